#include "compression/registry/registry.h"

#include <cmath>
#include <stdexcept>

#include "compression/quantized/block_quant.h"
#include "compression/quantized/entropy.h"
#include "compression/quantized/half.h"
#include "compression/quantized/low_bit.h"
#include "compression/selective/random_k.h"
#include "compression/selective/top_k.h"

namespace zeropg {

namespace {

// Takes the parameters one by one; what remains is unknown to the compressor. It learns which ones there are.
class Reader {
 public:
  Reader(std::string_view name, const CompressorParameters& parameters) : name_(name), rest_(parameters) {}

  int64_t integer(const std::string& key, int64_t default_value) {
    const double value = take(key, default_value, static_cast<double>(default_value));
    if (value != std::floor(value) || std::abs(value) > 1e15) {
      throw std::invalid_argument(name_ + ": " + key + " is " + std::to_string(value) + ", expected an integer");
    }
    return static_cast<int64_t>(value);
  }

  double real(const std::string& key, double default_value) { return take(key, default_value, default_value); }

  bool flag(const std::string& key, bool default_value) {
    const double value = take(key, default_value, default_value ? 1 : 0);
    if (value != 0 && value != 1) {
      throw std::invalid_argument(name_ + ": " + key + " is " + std::to_string(value) + ", expected True or False");
    }
    return value == 1;
  }

  void finish() const {
    if (rest_.empty()) return;
    throw std::invalid_argument(name_ + " has no parameter '" + rest_.begin()->first + "'");
  }

  std::vector<std::pair<std::string, CompressorDefault>> taken() const { return taken_; }  // with their defaults

 private:
  double take(const std::string& key, CompressorDefault default_value, double value) {
    taken_.emplace_back(key, default_value);
    if (const auto entry = rest_.find(key); entry != rest_.end()) {
      value = entry->second;
      rest_.erase(entry);
    }
    return value;
  }

  std::string name_;
  CompressorParameters rest_;
  std::vector<std::pair<std::string, CompressorDefault>> taken_;
};

struct Entry {
  std::string_view name;
  std::string_view help;
  // Every parameter has a default.
  std::shared_ptr<const Compressor> (*make)(Reader& reader);
};

constexpr Entry kCompressors[] = {
    {"block_quant", BlockQuant::kHelp,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       const int64_t bits = reader.integer("bits", 8);
       auto codec = std::make_shared<BlockQuant>(bits, reader.integer("block", 256));
       return with_entropy(std::move(codec), reader.flag("entropy", false));
     }},
    {"one_bit", LowBit::kOneBitHelp,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       const int64_t block = reader.integer("block", 1024);
       const LowBitCode code = reader.flag("rotate", false) ? LowBitCode::kRotatedSign : LowBitCode::kSign;
       if (reader.flag("entropy", false)) {
         throw std::invalid_argument(
             "one_bit: entropy is True, but signs have nothing to save: 1.00 to 1.02 times "
             "fewer bytes were measured; leave it out, or use two_bit or block_quant");
       }
       return std::make_shared<LowBit>(code, block);
     }},
    {"two_bit", LowBit::kTwoBitHelp,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       const int64_t block = reader.integer("block", 1024);
       const LowBitCode code = reader.flag("rotate", false) ? LowBitCode::kRotatedFourLevel : LowBitCode::kTernary;
       return with_entropy(std::make_shared<LowBit>(code, block), reader.flag("entropy", false));
     }},
    {"bf16", Half::kBfloat16Help,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       const bool has_entropy = reader.flag("entropy", false);
       const HalfFormat format = has_entropy ? HalfFormat::kBfloat16Planes : HalfFormat::kBfloat16;
       return with_entropy(std::make_shared<Half>(format), has_entropy);
     }},
    {"fp16", Half::kFloat16Help,
     [](Reader&) -> std::shared_ptr<const Compressor> { return std::make_shared<Half>(HalfFormat::kFloat16); }},
    {"random_k", RandomK::kHelp,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       return std::make_shared<RandomK>(reader.real("ratio", 0.01));
     }},
    {"top_k", TopK::kHelp,
     [](Reader& reader) -> std::shared_ptr<const Compressor> {
       const double ratio = reader.real("ratio", 0.01);
       const int64_t value_bits = reader.integer("value_bits", 32);
       return std::make_shared<TopK>(ratio, value_bits, reader.flag("exact", true));
     }},
};

}  // namespace

std::shared_ptr<const Compressor> make_compressor(std::string_view name, const CompressorParameters& parameters) {
  for (const Entry& entry : kCompressors) {
    if (entry.name != name) continue;
    Reader reader(name, parameters);
    auto compressor = entry.make(reader);
    reader.finish();
    return compressor;
  }
  std::string known;
  for (const Entry& entry : kCompressors) known += (known.empty() ? "" : ", ") + std::string(entry.name);
  throw std::invalid_argument("no compressor is named '" + std::string(name) + "', expected one of " + known);
}

std::vector<CompressorDescription> compressors() {
  std::vector<CompressorDescription> result;
  for (const Entry& entry : kCompressors) {
    Reader reader(entry.name, {});
    entry.make(reader);
    result.push_back({entry.name, entry.help, reader.taken()});
  }
  return result;
}

}  // namespace zeropg

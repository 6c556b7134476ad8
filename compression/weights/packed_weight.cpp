#include "compression/weights/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "backend/platform/cpu/instruction_sets.h"
#include "compression/weights/nf4_levels.h"

namespace zeropg {
namespace {

constexpr uint8_t kMagic[2] = {'Z', 'Q'};
constexpr uint8_t kVersion = 1;
constexpr int64_t kScaleBytes = 2;
constexpr int64_t kBlockUnit = 32;
constexpr int64_t kMostRows = (int64_t{1} << 32) - 1;  // and columns; their product stays below 2^62

// Two's complement, as BlockQuant's codes.
constexpr WeightLevels kInt4Levels = {{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}};

const UsableKernels<PackedWeightSet> kernels {
  {Instructions::kPortable, {"portable", portable_packed_weight, portable_block_quant}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_packed_weight, avx2_block_quant}},
      {Instructions::kAvx512, {"avx512", avx512_packed_weight, avx512_block_quant}},
#endif
};

int64_t code_bits(WeightFormat format) { return format == WeightFormat::kInt8 ? 8 : 4; }

int64_t block_bytes(const PackedWeightShape& shape, int64_t count) {
  return count == 0 ? 0 : kScaleBytes + (count * code_bits(shape.format) + 7) / 8;
}

void check(const PackedWeightShape& shape) {
  if (shape.block < kBlockUnit || shape.block > kLargestQuantBlock || shape.block % kBlockUnit != 0) {
    throw std::invalid_argument("block is " + std::to_string(shape.block) + ", expected a multiple of 32 up to " +
                                std::to_string(kLargestQuantBlock) + "; 64 is a good one");
  }
  if (std::min(shape.rows, shape.columns) < 0 || std::max(shape.rows, shape.columns) > kMostRows ||
      (shape.columns > 0 && shape.rows > (int64_t{1} << 60) / shape.columns)) {
    throw std::invalid_argument("a weight of " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns) +
                                " values cannot be packed; expected fewer than 2^32 each way and 2^60 in all");
  }
}

void store_uint32(uint32_t value, std::byte* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::byte>(value >> 8 * i & 0xff);
}
int64_t load_uint32(const std::byte* bytes) {
  int64_t value = 0;
  for (int i = 0; i < 4; ++i) value |= std::to_integer<int64_t>(bytes[i]) << 8 * i;
  return value;
}

// In pieces that stay in the L1 cache between the two passes.
void unpack_8_bit(const PackedWeightShape& shape, const std::byte* blocks, int64_t count, WeightType type, void* out,
                  const PackedWeightSet& set) {
  const BlockQuantKernels block_quant = set.block_quant(8);
  if (type == WeightType::kFloat32) return block_quant.decode(blocks, count, shape.block, static_cast<float*>(out));
  const PackedWeightKernels kernels = set.kernels();
  float values[kLargestQuantBlock];
  for (int64_t start = 0; start < count; start += shape.block) {
    const int64_t length = std::min(shape.block, count - start);
    block_quant.decode(blocks, length, shape.block, values);
    kernels.narrow(values, length, type, static_cast<uint16_t*>(out) + start);
    blocks += block_bytes(shape, length);
  }
}

}  // namespace

std::span<const PackedWeightSet> usable_packed_weight_sets() { return kernels.all(); }

WeightFormat weight_format_of(const std::string& name) {
  for (const WeightFormat format : {WeightFormat::kNf4, WeightFormat::kInt4, WeightFormat::kInt8}) {
    if (name == name_of(format)) return format;
  }
  throw std::invalid_argument("format is '" + name + "', expected \"nf4\", \"int4\" or \"int8\"");
}

const char* name_of(WeightFormat format) {
  return format == WeightFormat::kNf4 ? "nf4" : format == WeightFormat::kInt4 ? "int4" : "int8";
}

int64_t packed_weight_bytes(const PackedWeightShape& shape) {
  check(shape);
  return kPackedWeightHeaderBytes + shape.numel() / shape.block * block_bytes(shape, shape.block) +
         block_bytes(shape, shape.numel() % shape.block);
}

void pack_weight(const PackedWeightShape& shape, std::span<const float> values, std::span<std::byte> packed,
                 const PackedWeightSet& set) {
  if (static_cast<int64_t>(values.size()) != shape.numel() ||
      static_cast<int64_t>(packed.size()) != packed_weight_bytes(shape)) {
    throw std::invalid_argument("the values or the bytes have another size than the shape says");
  }
  std::byte* header = packed.data();
  const uint8_t bytes[] = {kMagic[0],
                           kMagic[1],
                           kVersion,
                           static_cast<uint8_t>(shape.format),
                           static_cast<uint8_t>(shape.block / kBlockUnit),
                           0,
                           0,
                           0};
  std::memcpy(header, bytes, sizeof(bytes));
  store_uint32(static_cast<uint32_t>(shape.rows), header + 8);
  store_uint32(static_cast<uint32_t>(shape.columns), header + 12);
  std::byte* blocks = header + kPackedWeightHeaderBytes;
  if (shape.format == WeightFormat::kNf4) {
    set.kernels().encode_nf4(values.data(), shape.numel(), shape.block, blocks);
  } else {
    const auto bits = static_cast<int>(code_bits(shape.format));
    set.block_quant(bits).encode(values.data(), nullptr, shape.numel(), shape.block, blocks);
  }
}

PackedWeightShape shape_of_packed(std::span<const std::byte> packed) {
  const auto at = [&](size_t place) { return std::to_integer<uint8_t>(packed[place]); };
  if (packed.size() < kPackedWeightHeaderBytes || at(0) != kMagic[0] || at(1) != kMagic[1] || at(2) != kVersion ||
      at(3) < 1 || at(3) > 3) {
    throw std::invalid_argument("the bytes hold no packed weight of this version");
  }
  const PackedWeightShape shape = {.format = static_cast<WeightFormat>(at(3)),
                                   .block = kBlockUnit * at(4),
                                   .rows = load_uint32(packed.data() + 8),
                                   .columns = load_uint32(packed.data() + 12)};
  if (packed_weight_bytes(shape) != static_cast<int64_t>(packed.size())) {
    throw std::invalid_argument("the packed weight of " + std::to_string(shape.rows) + " x " +
                                std::to_string(shape.columns) + " values has " + std::to_string(packed.size()) +
                                " bytes, expected " + std::to_string(packed_weight_bytes(shape)));
  }
  return shape;
}

void unpack_weight(const PackedWeightShape& shape, std::span<const std::byte> packed, int64_t start, int64_t stop,
                   WeightType type, void* out, const PackedWeightSet& set) {
  const std::byte* blocks =
      packed.data() + kPackedWeightHeaderBytes + start / shape.block * block_bytes(shape, shape.block);
  if (shape.format == WeightFormat::kInt8) return unpack_8_bit(shape, blocks, stop - start, type, out, set);
  const WeightLevels& levels = shape.format == WeightFormat::kNf4 ? kNf4Levels : kInt4Levels;
  set.kernels().decode_4_bit(levels, blocks, stop - start, shape.block, type, out);
}

}  // namespace zeropg

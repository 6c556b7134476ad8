#include "compression/quantized/entropy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#if defined(ZEROPG_WITH_ZSTD)
#define ZSTD_STATIC_LINKING_ONLY  // ZSTD_c_literalCompressionMode
#include <zstd.h>
#endif

namespace zeropg {

#if defined(ZEROPG_WITH_ZSTD)

namespace {

// First byte of an encoding.
constexpr std::byte kAsItIs{0};
constexpr std::byte kPacked{1};

// The fastest that zstd has: hardly any search for repetitions, of which codes of gradients have none.
constexpr int kLevel = -50;

struct Free {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// Kept by each thread, as the memory that codecs encode into and out of: about 1 MiB where entropy is used.
struct Workspace {
  std::unique_ptr<ZSTD_CCtx, Free> packer;
  std::unique_ptr<ZSTD_DCtx, Free> unpacker;
  std::vector<std::byte> bytes;

  std::span<std::byte> room(int64_t size) {
    if (bytes.size() < static_cast<size_t>(size)) bytes.resize(static_cast<size_t>(size));
    return {bytes.data(), static_cast<size_t>(size)};
  }
};

Workspace& workspace() {
  thread_local Workspace mine;
  return mine;
}

ZSTD_CCtx* packer(Workspace& work) {
  if (work.packer == nullptr) {
    work.packer.reset(ZSTD_createCCtx());
    if (work.packer == nullptr) throw std::bad_alloc();
    ZSTD_CCtx_setParameter(work.packer.get(), ZSTD_c_compressionLevel, kLevel);
    ZSTD_CCtx_setParameter(work.packer.get(), ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
    ZSTD_CCtx_setParameter(work.packer.get(), ZSTD_c_contentSizeFlag, 0);
  }
  return work.packer.get();
}

ZSTD_DCtx* unpacker(Workspace& work) {
  if (work.unpacker == nullptr) {
    work.unpacker.reset(ZSTD_createDCtx());
    if (work.unpacker == nullptr) throw std::bad_alloc();
  }
  return work.unpacker.get();
}

class Entropy final : public Compressor {
 public:
  explicit Entropy(std::shared_ptr<const Compressor> codec) : codec_(std::move(codec)) {}

  std::string description() const override {
    std::string text = codec_->description();
    return text.insert(text.size() - 1, text.ends_with("()") ? "entropy=True" : ", entropy=True");
  }
  int64_t block_elements() const override { return codec_->block_elements(); }
  int64_t capacity_bytes(int64_t count) const override { return count == 0 ? 0 : 1 + codec_->capacity_bytes(count); }
  bool has_fixed_size() const override { return false; }
  // A quarter less was measured for int4, ternary codes and bfloat16 of a GPT's gradients.
  int64_t typical_bytes(int64_t count) const override { return codec_->typical_bytes(count) * 3 / 4; }

  int64_t encode(std::span<const float> values, std::span<float> residual,
                 std::span<std::byte> encoded) const override {
    if (values.empty()) return 0;
    Workspace& work = workspace();
    const std::span<std::byte> plain = work.room(codec_->capacity_bytes(static_cast<int64_t>(values.size())));
    codec_->encode(values, residual, plain);
    // Room for one byte less than it has as it is: what does not fit is not shorter.
    const size_t packed =
        ZSTD_compress2(packer(work), encoded.data() + 1, plain.size() - 1, plain.data(), plain.size());
    if (!ZSTD_isError(packed)) {
      encoded[0] = kPacked;
      return 1 + static_cast<int64_t>(packed);
    }
    encoded[0] = kAsItIs;
    std::copy(plain.begin(), plain.end(), encoded.begin() + 1);
    return 1 + static_cast<int64_t>(plain.size());
  }

  void decode(std::span<const std::byte> encoded, std::span<float> values) const override {
    const std::span<const std::byte> plain = unpacked(encoded, values.size());
    plain.empty() ? spoil(values) : codec_->decode(plain, values);
  }

  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override {
    const std::span<const std::byte> plain = unpacked(encoded, values.size());
    plain.empty() ? spoil(values) : codec_->decode_add(plain, values);
  }

 private:
  // What the codec made of `count` values, in the thread's workspace; empty where it is no encoding of them, or there
  // are none.
  std::span<const std::byte> unpacked(std::span<const std::byte> encoded, size_t count) const {
    const auto size = static_cast<size_t>(codec_->capacity_bytes(static_cast<int64_t>(count)));
    if (encoded.empty()) return {};
    const std::span<const std::byte> rest = encoded.subspan(1);
    if (encoded[0] == kAsItIs) return rest.size() == size ? rest : std::span<const std::byte>();
    if (encoded[0] != kPacked) return {};
    Workspace& work = workspace();
    const std::span<std::byte> plain = work.room(static_cast<int64_t>(size));
    const size_t found = ZSTD_decompressDCtx(unpacker(work), plain.data(), size, rest.data(), rest.size());
    if (ZSTD_isError(found) || found != size) return {};
    return plain;
  }

  static void spoil(std::span<float> values) {
    std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
  }

  std::shared_ptr<const Compressor> codec_;  // of fixed size
};

}  // namespace

std::shared_ptr<const Compressor> with_entropy(std::shared_ptr<const Compressor> codec, bool is_wanted) {
  if (!is_wanted) return codec;
  return std::make_shared<Entropy>(std::move(codec));
}

#else

std::shared_ptr<const Compressor> with_entropy(std::shared_ptr<const Compressor> codec, bool is_wanted) {
  if (!is_wanted) return codec;
  throw std::invalid_argument(codec->description() +
                              ": entropy is True, but zeropg was built without libzstd; install libzstd-dev and "
                              "build again, or leave it out");
}

#endif

}  // namespace zeropg

// 16-bit floats: half of fp32's bytes, to nearest even.
//
// Bfloat16 has fp32's range. For an entropy coder all exponents lie behind all the rest: only in them it finds
// something. IEEE half precision keeps more of the fraction: values beyond 65504 become infinite, so that a gradient
// scaler notices; those below 2^-25 become zero and stay in the residual.
#pragma once

#include "compression/compressor.h"
#include "compression/quantized/half_kernels.h"

namespace zeropg {

class Half final : public Compressor {
 public:
  static constexpr char kBfloat16Help[] = R"(Bfloat16: 50 % of fp32's bytes and all of its range.

    entropy: pack the exponents with Huffman's code where that is shorter: a quarter fewer bytes, about 1 GB/s per core.

    Raises ValueError for other values.)";
  static constexpr char kFloat16Help[] =
      "IEEE half precision: 50 % of fp32's bytes. Gradients beyond 65504 become infinite.";

  // `set` is for tests: it changes the speed, never the bits.
  explicit Half(HalfFormat format, const HalfSet& set = usable_half_sets().back())
      : format_(format), kernels_(set.kernels(format)) {}

  std::string description() const override { return format_ == HalfFormat::kFloat16 ? "fp16()" : "bf16()"; }
  int64_t block_elements() const override { return 1; }
  int64_t capacity_bytes(int64_t count) const override { return 2 * count; }

  int64_t encode(std::span<const float> values, std::span<float> residual,
                 std::span<std::byte> encoded) const override {
    const auto count = static_cast<int64_t>(values.size());
    kernels_.encode(values.data(), residual.empty() ? nullptr : residual.data(), count, encoded.data());
    return capacity_bytes(count);
  }
  void decode(std::span<const std::byte> encoded, std::span<float> values) const override {
    kernels_.decode(encoded.data(), static_cast<int64_t>(values.size()), values.data());
  }
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override {
    kernels_.decode_add(encoded.data(), static_cast<int64_t>(values.size()), values.data());
  }

 private:
  HalfFormat format_;
  HalfKernels kernels_;
};

}  // namespace zeropg

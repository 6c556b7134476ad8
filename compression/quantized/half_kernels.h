// The kernels behind Bf16 and Fp16: one table per instruction set, all compiled from half_kernels.inc. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

enum class HalfFormat : uint8_t {
  kBfloat16,
  kBfloat16Planes,  // signs and fractions of all values, then their exponents
  kFloat16,
};

// `count` floats in 2 * count bytes. `residual` may be null.
struct HalfKernels {
  void (*encode)(const float* values, float* residual, int64_t count, std::byte* encoded);
  void (*decode)(const std::byte* encoded, int64_t count, float* values);
  void (*decode_add)(const std::byte* encoded, int64_t count, float* values);
};

HalfKernels portable_half(HalfFormat format);
#if defined(__x86_64__)
HalfKernels avx2_half(HalfFormat format);
HalfKernels avx512_half(HalfFormat format);
#endif

// What this processor can run, the best last. All give the same bits.
struct HalfSet {
  const char* name;
  HalfKernels (*kernels)(HalfFormat format);
};
std::span<const HalfSet> usable_half_sets();

}  // namespace zeropg

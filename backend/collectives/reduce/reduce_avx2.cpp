// Kernels for processors with AVX2 and F16C.
#include "backend/collectives/reduce/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c")

namespace zeropg {
namespace {

#define ZEROPG_HALF_LANES 8
typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
inline Lanes widen_halves(const uint16_t* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
inline void narrow_halves(Lanes values, uint16_t* destination) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
inline Words rounded_bits(Lanes values) {
  const auto bits = __builtin_bit_cast(Words, values);
  return bits + 0x7fff + ((bits >> 16) & 1);
}
inline Words narrow_pairs(Lanes low, Lanes high) { return rounded_bits(low) >> 16 | (rounded_bits(high) & 0xffff0000); }

}  // namespace
}  // namespace zeropg

#include "backend/collectives/reduce/reduce_kernels.inc"

namespace zeropg {

ReduceKernel avx2_kernel(DType dtype, ReduceOp op) { return find_kernel(dtype, op); }

ReduceKernel avx2_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form) {
  return find_accumulator_kernel(dtype, op, form);
}

}  // namespace zeropg
#endif

// Kernels for processors with AVX-512 (F, BW, VL, DQ, VNNI: Cascade Lake, Zen 4 and later).
#include "backend/collectives/reduce/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

// GCC's own fp16 conversions read an undefined register on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

namespace zeropg {
namespace {

#define ZEROPG_HALF_LANES 16
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
inline Lanes widen_halves(const uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline void narrow_halves(Lanes values, uint16_t* destination) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
// As the scalar one in two instructions for four, which are half of what bf16 costs: beside the bit above it a word of
// 0x7fff, and both are added at once as products of words by one.
inline __m512i rounded_bits(Lanes values) {
  const __m512i bits = _mm512_castps_si512(values);
  constexpr int kFirstAndSecondOrThird = 0xea;
  const __m512i addends =
      _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x10000), _mm512_set1_epi32(0x7fff), kFirstAndSecondOrThird);
  return _mm512_dpwssd_epi32(bits, addends, _mm512_set1_epi32(0x10001));
}
inline Words narrow_pairs(Lanes low, Lanes high) {
  // The upper word of each 32-bit lane of `low` goes below that of `high`.
  const __m512i upper_words = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  constexpr __mmask64 kLowerWords = 0x3333333333333333;
  return __builtin_bit_cast(Words,
                            _mm512_mask_shuffle_epi8(rounded_bits(high), kLowerWords, rounded_bits(low), upper_words));
}

}  // namespace
}  // namespace zeropg

#include "backend/collectives/reduce/reduce_kernels.inc"

namespace zeropg {

// GCC 12 turns complex products into fused multiply-adds whatever -ffp-contract says; the AVX2 target has none.
ReduceKernel avx512_kernel(DType dtype, ReduceOp op) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return is_complex ? avx2_kernel(dtype, op) : find_kernel(dtype, op);
}

ReduceKernel avx512_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form) {
  return find_accumulator_kernel(dtype, op, form);
}

}  // namespace zeropg
#endif

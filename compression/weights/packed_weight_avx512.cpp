// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "compression/weights/nf4_levels.h"
#include "compression/weights/packed_weight_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

namespace zeropg {
namespace {

int64_t look_up(const float* table, const uint8_t* codes, int64_t pairs, float* low, float* high) {
  const __m512 levels = _mm512_loadu_ps(table);
  int64_t i = 0;
  for (; i + 16 <= pairs; i += 16) {
    // The permutation looks at four bits of an index. Masks of all lanes: GCC 12 warns of the intrinsics without.
    const __m512i both =
        _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    _mm512_storeu_ps(low + i, _mm512_maskz_permutexvar_ps(0xffff, both, levels));
    _mm512_storeu_ps(high + i, _mm512_maskz_permutexvar_ps(0xffff, _mm512_maskz_srli_epi32(0xffff, both, 4), levels));
  }
  return i;
}

int64_t look_up(const uint16_t* table, const uint8_t* codes, int64_t pairs, uint16_t* low, uint16_t* high) {
  const __m512i levels = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)));
  constexpr __mmask32 kAll = 0xffffffff;
  const __m512i nibble = _mm512_set1_epi16(15);
  int64_t i = 0;
  for (; i + 32 <= pairs; i += 32) {
    const __m512i both =
        _mm512_maskz_cvtepu8_epi16(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    _mm512_storeu_si512(low + i, _mm512_maskz_permutexvar_epi16(kAll, _mm512_and_si512(both, nibble), levels));
    _mm512_storeu_si512(high + i, _mm512_maskz_permutexvar_epi16(kAll, _mm512_maskz_srli_epi16(kAll, both, 4), levels));
  }
  return i;
}

}  // namespace
}  // namespace zeropg

#include "compression/weights/packed_weight_kernels.inc"

namespace zeropg {

PackedWeightKernels avx512_packed_weight() { return kKernels; }

}  // namespace zeropg
#endif

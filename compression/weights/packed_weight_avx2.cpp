// Kernels for processors with AVX2.
#include "compression/weights/nf4_levels.h"
#include "compression/weights/packed_weight_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2")

namespace zeropg {
namespace {

// A permutation knows 8 of the 16 values; bit 3 of a code, moved to the sign, chooses between two.
inline __m256 pick(__m256 first, __m256 last, __m256i codes) {
  const __m256 choice = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, codes), _mm256_permutevar8x32_ps(last, codes), choice);
}

int64_t look_up(const float* table, const uint8_t* codes, int64_t pairs, float* low, float* high) {
  const __m256 first = _mm256_loadu_ps(table);
  const __m256 last = _mm256_loadu_ps(table + 8);
  int64_t i = 0;
  for (; i + 8 <= pairs; i += 8) {
    const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    _mm256_storeu_ps(low + i, pick(first, last, both));
    _mm256_storeu_ps(high + i, pick(first, last, _mm256_srli_epi32(both, 4)));
  }
  return i;
}

struct Bytes {
  __m128i low;   // of each of the 16 values
  __m128i high;  // likewise
};

inline void store(const Bytes& table, __m128i codes, uint16_t* out) {
  const __m128i low = _mm_shuffle_epi8(table.low, codes);
  const __m128i high = _mm_shuffle_epi8(table.high, codes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi8(low, high));
}

int64_t look_up(const uint16_t* table, const uint8_t* codes, int64_t pairs, uint16_t* low, uint16_t* high) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 8));
  const __m128i byte = _mm_set1_epi16(0xff);
  const Bytes bytes = {_mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(last, byte)),
                       _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8))};
  const __m128i nibble = _mm_set1_epi8(15);
  int64_t i = 0;
  for (; i + 16 <= pairs; i += 16) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    store(bytes, _mm_and_si128(both, nibble), low + i);
    store(bytes, _mm_and_si128(_mm_srli_epi16(both, 4), nibble), high + i);
  }
  return i;
}

}  // namespace
}  // namespace zeropg

#include "compression/weights/packed_weight_kernels.inc"

namespace zeropg {

PackedWeightKernels avx2_packed_weight() { return kKernels; }

}  // namespace zeropg
#endif

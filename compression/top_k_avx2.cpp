// Kernels for processors with AVX2.
#include "compression/top_k_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2")

namespace zeropg {
namespace {

// Which lanes go to the front for each mask.
struct Fronts {
  uint8_t lanes[256][8];
};
constexpr Fronts fronts() {
  Fronts result{};
  for (int mask = 0; mask < 256; ++mask) {
    int found = 0;
    for (int lane = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) result.lanes[mask][found++] = static_cast<uint8_t>(lane);
    }
  }
  return result;
}
constexpr Fronts kFronts = fronts();

struct Lanes {
  static constexpr int64_t kLanes = 8;
  static __m256i zeros() { return _mm256_setzero_si256(); }
  // Magnitudes are positive as signed integers, and a bound that no magnitude reaches stays one.
  static __m256i bound(uint32_t at_least) { return _mm256_set1_epi32(static_cast<int>(at_least - 1)); }
  static __m256i without_sign(__m256 values) {
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7fffffff));
  }
  static __m256i load(const float* values) { return without_sign(_mm256_loadu_ps(values)); }
  static __m256i load_sum(const float* values, const float* others) {
    return without_sign(_mm256_add_ps(_mm256_loadu_ps(values), _mm256_loadu_ps(others)));
  }
  static __m256i indices(uint32_t first) {
    return _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256i highest(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  static uint32_t mask_of(__m256i lanes, __m256i bound) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(lanes, bound))));
  }
  static int64_t pack(uint32_t* out, __m256i lanes, uint32_t mask) {
    const __m128i front = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kFronts.lanes[mask]));
    store(out, _mm256_permutevar8x32_epi32(lanes, _mm256_cvtepu8_epi32(front)));
    return __builtin_popcount(mask);
  }
  static void store(uint32_t* out, __m256i lanes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), lanes); }
};

}  // namespace
}  // namespace zeropg

#include "compression/top_k_kernels.inc"

namespace zeropg {

TopKKernels avx2_top_k() { return kKernels; }

}  // namespace zeropg
#endif

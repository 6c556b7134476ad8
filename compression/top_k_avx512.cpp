// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "compression/top_k_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// GCC's own maximum reads an undefined register on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

namespace zeropg {
namespace {

struct Lanes {
  static constexpr int64_t kLanes = 16;
  static __m512i zeros() { return _mm512_setzero_si512(); }
  static __m512i bound(uint32_t at_least) { return _mm512_set1_epi32(static_cast<int>(at_least)); }
  static __m512i without_sign(__m512 values) {
    return _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff));
  }
  static __m512i load(const float* values) { return without_sign(_mm512_loadu_ps(values)); }
  static __m512i load_sum(const float* values, const float* others) {
    return without_sign(_mm512_add_ps(_mm512_loadu_ps(values), _mm512_loadu_ps(others)));
  }
  static __m512i indices(uint32_t first) {
    return _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static __m512i highest(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
  static __mmask16 mask_of(__m512i lanes, __m512i bound) { return _mm512_cmpge_epu32_mask(lanes, bound); }
  // Packed in a register: a store that packs is microcode on some processors, 100 cycles and more.
  static int64_t pack(uint32_t* out, __m512i lanes, __mmask16 mask) {
    store(out, _mm512_maskz_compress_epi32(mask, lanes));
    return __builtin_popcount(mask);
  }
  static void store(uint32_t* out, __m512i lanes) { _mm512_storeu_si512(out, lanes); }
};

}  // namespace
}  // namespace zeropg

#include "compression/top_k_kernels.inc"

namespace zeropg {

TopKKernels avx512_top_k() { return kKernels; }

}  // namespace zeropg
#endif

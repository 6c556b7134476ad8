// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "backend/collectives/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

// GCC's own fp16 conversions read an undefined register on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")

namespace zeropg {
namespace {

#define ZEROPG_HALF_LANES 16
typedef float Lanes __attribute__((vector_size(64)));
inline Lanes widen_halves(const uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline void narrow_halves(Lanes values, uint16_t* destination) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace zeropg

#include "backend/collectives/reduce_kernels.inc"

namespace zeropg {

// GCC 12 turns complex products into fused multiply-adds whatever -ffp-contract says; the AVX2 target has none.
ReduceKernel avx512_kernel(DType dtype, ReduceOp op) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return is_complex ? avx2_kernel(dtype, op) : find_kernel(dtype, op);
}

}  // namespace zeropg
#endif

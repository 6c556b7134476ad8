// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "compression/quantized/half_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

#include "compression/quantized/half_kernels.inc"

namespace zeropg {

HalfKernels avx512_half(HalfFormat format) { return find_kernels(format); }

}  // namespace zeropg
#endif

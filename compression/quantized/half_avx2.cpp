// Kernels for processors with AVX2.
#include "compression/quantized/half_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2")

#include "compression/quantized/half_kernels.inc"

namespace zeropg {

HalfKernels avx2_half(HalfFormat format) { return find_kernels(format); }

}  // namespace zeropg
#endif

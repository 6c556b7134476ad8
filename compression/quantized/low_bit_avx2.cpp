// Kernels for processors with AVX2.
#include "compression/quantized/low_bit_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2")

#include "compression/quantized/low_bit_kernels.inc"

namespace zeropg {

LowBitKernels avx2_low_bit(LowBitCode code) { return find_kernels(code); }

}  // namespace zeropg
#endif

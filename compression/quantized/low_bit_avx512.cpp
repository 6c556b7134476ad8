// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "compression/quantized/low_bit_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

#include "compression/quantized/low_bit_kernels.inc"

namespace zeropg {

LowBitKernels avx512_low_bit(LowBitCode code) { return find_kernels(code); }

}  // namespace zeropg
#endif

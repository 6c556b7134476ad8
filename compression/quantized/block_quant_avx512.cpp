// Kernels for processors with AVX-512 (F, BW, VL, DQ).
#include "compression/quantized/block_quant_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

#include "compression/quantized/block_quant_kernels.inc"

namespace zeropg {

BlockQuantKernels avx512_block_quant(int bits) { return find_kernels(bits); }

}  // namespace zeropg
#endif

// Kernels for processors with AVX2.
#include "compression/quantized/block_quant_kernels.h"

#if defined(__x86_64__)

#pragma GCC optimize("O3", "fp-contract=off")
#pragma GCC target("avx2")

#include "compression/quantized/block_quant_kernels.inc"

namespace zeropg {

BlockQuantKernels avx2_block_quant(int bits) { return find_kernels(bits); }

}  // namespace zeropg
#endif

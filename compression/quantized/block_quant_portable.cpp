// Kernels for every processor.
#include "compression/quantized/block_quant_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")

#include "compression/quantized/block_quant_kernels.inc"

namespace zeropg {

BlockQuantKernels portable_block_quant(int bits) { return find_kernels(bits); }

}  // namespace zeropg

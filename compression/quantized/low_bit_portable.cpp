// Kernels for every processor.
#include "compression/quantized/low_bit_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")

#include "compression/quantized/low_bit_kernels.inc"

namespace zeropg {

LowBitKernels portable_low_bit(LowBitCode code) { return find_kernels(code); }

}  // namespace zeropg

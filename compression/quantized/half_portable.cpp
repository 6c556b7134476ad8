// Kernels for every processor.
#include "compression/quantized/half_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")

#include "compression/quantized/half_kernels.inc"

namespace zeropg {

HalfKernels portable_half(HalfFormat format) { return find_kernels(format); }

}  // namespace zeropg

// Kernels for any processor.
#include "backend/collectives/reduce/reduce_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")
#include "backend/collectives/reduce/reduce_kernels.inc"

namespace zeropg {

ReduceKernel portable_kernel(DType dtype, ReduceOp op) { return find_kernel(dtype, op); }

ReduceKernel portable_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form) {
  return find_accumulator_kernel(dtype, op, form);
}

}  // namespace zeropg

// The kernels behind reduce(): one table per instruction set, all compiled from reduce_kernels.inc. Internal.
#pragma once

#include <cstdint>
#include <span>

#include "backend/collectives/reduce/reduce.h"

namespace zeropg {

struct ReduceArguments {
  void* destination = nullptr;
  const void* const* sources = nullptr;
  int32_t source_count = 0;
  int64_t numel = 0;
  double factor = 1;  // kPremulSum and kAverage
  double factor_imaginary = 0;
};
using ReduceKernel = void (*)(const ReduceArguments&);

// nullptr for an unsupported pair.
ReduceKernel portable_kernel(DType dtype, ReduceOp op);
#if defined(__x86_64__)
ReduceKernel avx2_kernel(DType dtype, ReduceOp op);
ReduceKernel avx512_kernel(DType dtype, ReduceOp op);
#endif

// To and from the accumulators of 16-bit floats; nullptr for any other dtype.
ReduceKernel portable_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form);
#if defined(__x86_64__)
ReduceKernel avx2_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form);
ReduceKernel avx512_accumulator_kernel(DType dtype, ReduceOp op, ReduceForm form);
#endif

// What this processor can run, the best last.
struct InstructionSet {
  const char* name;
  ReduceKernel (*kernel)(DType, ReduceOp);
  ReduceKernel (*accumulator_kernel)(DType, ReduceOp, ReduceForm);
};
std::span<const InstructionSet> usable_instruction_sets();

}  // namespace zeropg

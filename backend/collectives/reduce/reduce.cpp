#include "backend/collectives/reduce/reduce.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "backend/collectives/reduce/reduce_kernels.h"
#include "backend/platform/cpu/ieee_arithmetic.h"
#include "backend/platform/cpu/instruction_sets.h"

namespace zeropg {

namespace {

// One source, and an operation that leaves it as it is.
bool is_copy(int32_t source_count, DType dtype, ReduceOp op) {
  return source_count == 1 && op != ReduceOp::kAverage && op != ReduceOp::kPremulSum && dtype != DType::kBool;
}

ReduceKernel best_kernel(DType dtype, ReduceOp op, ReduceForm form) {
  const InstructionSet& best = usable_instruction_sets().back();
  return form == ReduceForm::kWhole ? best.kernel(dtype, op) : best.accumulator_kernel(dtype, op, form);
}

const UsableKernels<InstructionSet> kernels {
  {Instructions::kPortable, {"portable", portable_kernel, portable_accumulator_kernel}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_kernel, avx2_accumulator_kernel}},
      {Instructions::kAvx512Vnni, {"avx512", avx512_kernel, avx512_accumulator_kernel}},
#endif
};

}  // namespace

std::span<const InstructionSet> usable_instruction_sets() { return kernels.all(); }

bool is_supported(DType dtype, ReduceOp op) { return portable_kernel(dtype, op) != nullptr; }

void reduce(void* destination, const void* const* sources, int32_t source_count, int64_t numel, DType dtype,
            ReduceOp op, std::complex<double> factor, bool is_final, ReduceForm form) {
  if (accumulator_dtype(dtype) == dtype) form = ReduceForm::kWhole;
  if (op == ReduceOp::kAverage && !is_final && best_kernel(dtype, op, form) != nullptr) op = ReduceOp::kSum;
  const ReduceKernel kernel = best_kernel(dtype, op, form);
  if (kernel == nullptr || source_count < 1) {
    throw std::invalid_argument(std::string("reduce: ") + reduce_op_name(op) + " over " + std::to_string(source_count) +
                                " sources of " + dtype_name(dtype) + " is not supported; ask is_supported() first");
  }
  if (form == ReduceForm::kWhole && is_copy(source_count, dtype, op)) {
    if (destination != sources[0]) std::memcpy(destination, sources[0], numel * element_bytes(dtype));
    return;
  }
  const IeeeArithmetic rules;
  kernel({.destination = destination,
          .sources = sources,
          .source_count = source_count,
          .numel = numel,
          .factor = factor.real(),
          .factor_imaginary = factor.imag()});
}

}  // namespace zeropg

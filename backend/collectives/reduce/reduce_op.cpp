#include "backend/collectives/reduce/reduce_op.h"

#include <cstddef>

namespace zeropg {

DType accumulator_dtype(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

Widening widening(DType dtype, ReduceForm form) {
  const int64_t times = element_bytes(accumulator_dtype(dtype)) / element_bytes(dtype);
  return {form == ReduceForm::kFromAccumulators ? times : 1, form == ReduceForm::kToAccumulators ? times : 1};
}

int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"uint8",    "int8",    "int16",   "int32", "int64",     "float16",
                                               "bfloat16", "float32", "float64", "bool",  "complex64", "complex128"};
  const auto index = static_cast<size_t>(dtype);
  return index < kDTypeCount ? kNames[index] : "unknown";
}

const char* reduce_op_name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum",     "avg",    "product", "min",       "max",
                                                  "bit_and", "bit_or", "bit_xor", "premul_sum"};
  const auto index = static_cast<size_t>(op);
  return index < kReduceOpCount ? kNames[index] : "unknown";
}

}  // namespace zeropg

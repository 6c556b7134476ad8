// What is reduced, and how: element types and operations, with their names. What they do is in reduce.h.
#pragma once

#include <cstdint>

namespace zeropg {

enum class DType : uint8_t {
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,  // sum, max, bit_or: logical or; product, min, bit_and: logical and; bit_xor: logical xor
  kComplex64,
  kComplex128,
};
inline constexpr int kDTypeCount = 12;

enum class ReduceOp : uint8_t {
  kSum,
  kAverage,  // the sum, divided by `factor` (the world size) where the result is final
  kProduct,
  kMin,  // NaN where any source is NaN, as in torch; the same for kMax
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
  kPremulSum,  // the sum of factor * source
};
inline constexpr int kReduceOpCount = 9;

// Where 16-bit floats are reduced in several steps, what lies between these stays in the dtype that they are
// accumulated in, so that there is one rounding.
enum class ReduceForm : uint8_t {
  kWhole,             // sources and destination are of the collective's dtype
  kToAccumulators,    // the destination is of accumulator_dtype()
  kFromAccumulators,  // the sources are
};
DType accumulator_dtype(DType dtype);  // fp32 for 16-bit floats, everything else is accumulated in its own
// How many times as many bytes as sources and as destination elements of the dtype have.
struct Widening {
  int64_t of_sources = 1;
  int64_t of_destination = 1;
};
Widening widening(DType dtype, ReduceForm form);

int64_t element_bytes(DType dtype);
const char* dtype_name(DType dtype);      // "bfloat16", ...
const char* reduce_op_name(ReduceOp op);  // "premul_sum", ...

// How results of `op` over some of the sources are joined: as the sources themselves, but multiplied no more.
inline ReduceOp op_over_partial_results(ReduceOp op) { return op == ReduceOp::kPremulSum ? ReduceOp::kSum : op; }

}  // namespace zeropg

// Elementwise reduction on the CPU, by dtype. Knows no tensor library.
//
// Sources are taken in the order given and each element is reduced independently, so the result does not depend on how
// a tensor is cut. 16-bit floats are accumulated in fp32 and rounded once, to nearest even; everything else in its own
// type (integers wrap around). Each instruction set gives the same bits: no fused multiply-add anywhere.
#pragma once

#include <complex>
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

int64_t element_bytes(DType dtype);
const char* dtype_name(DType dtype);      // "bfloat16", ...
const char* reduce_op_name(ReduceOp op);  // "premul_sum", ...

// How results of `op` over some of the sources are joined: as the sources themselves, but multiplied no more.
inline ReduceOp op_over_partial_results(ReduceOp op) { return op == ReduceOp::kPremulSum ? ReduceOp::kSum : op; }

// Refused: the bitwise operations on floats, order on complex numbers, averages and factors on integers and bool.
bool is_supported(DType dtype, ReduceOp op);

// destination[i] = op over sources[0..source_count)[i], in that order. Arrays are contiguous, `numel` elements long and
// aligned to their element; the destination may be one of the sources (but not overlap one at an offset).
// `factor`: the multiplier of kPremulSum, the divisor of kAverage, otherwise ignored; its imaginary part counts for
// complex dtypes only. `is_final`: false where other ranks' contributions are still to come.
// Throws std::invalid_argument for an unsupported pair of dtype and op, or without sources.
void reduce(void* destination, const void* const* sources, int32_t source_count, int64_t numel, DType dtype,
            ReduceOp op, std::complex<double> factor, bool is_final);

}  // namespace zeropg

// Elementwise reduction on the CPU, by dtype. Knows no tensor library.
//
// Sources are taken in the order given and each element is reduced independently, so the result does not depend on how
// a tensor is cut. 16-bit floats are accumulated in fp32 and rounded once, to nearest even; everything else in its own
// type (integers wrap around; their averages are rounded toward zero). Each instruction set gives the same bits: no
// fused multiply-add anywhere, and whatever the calling thread does with subnormal numbers and rounding.
#pragma once

#include <complex>
#include <cstdint>

#include "backend/collectives/reduce/reduce_op.h"

namespace zeropg {

// Refused: the bitwise operations on floats, order on complex numbers, factors on integers, both and averages on bool.
bool is_supported(DType dtype, ReduceOp op);

// destination[i] = op over sources[0..source_count)[i], in that order. Arrays are contiguous, `numel` elements long and
// aligned to their element; the destination may be one of the sources (but not overlap one at an offset).
// `factor`: the multiplier of kPremulSum, the divisor of kAverage, otherwise ignored; its imaginary part counts for
// complex dtypes only. `is_final`: false where other ranks' contributions are still to come.
// `form`: what the elements of sources and destination are.
// Throws std::invalid_argument for an unsupported pair of dtype and op, or without sources.
void reduce(void* destination, const void* const* sources, int32_t source_count, int64_t numel, DType dtype,
            ReduceOp op, std::complex<double> factor, bool is_final, ReduceForm form = ReduceForm::kWhole);

}  // namespace zeropg

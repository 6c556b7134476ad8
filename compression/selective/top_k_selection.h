// Which values top-k sends: the largest magnitudes of several ranges, and where they are in a part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "compression/compressor.h"
#include "compression/selective/top_k_kernels.h"

namespace zeropg {

int64_t numel_of(std::span<const SelectionRange> ranges);

// Adds values to residuals and selects the `wanted` largest magnitudes of all ranges, the first ones where several
// equal the smallest of them, or all that are not zero. Not exact: about as many. Where a magnitude is `limit` or more,
// nothing is added and the selection is not finite. `ranges` are not empty.
Selection select_largest(const TopKKernels& kernels, std::span<const SelectionRange> ranges, int64_t wanted,
                         bool is_exact, uint32_t limit);

// The places of a selection that lie in its part, whose length is `count`; counted from its beginning, rising.
std::vector<uint32_t> selected_places(const Selection& selection, int64_t count);

// Where the i-th value of a sample is taken: one in each stride, at a place in it that looks random (the finalizer of
// MurmurHash3), since the lengths of rows are multiples of many strides. The same on every machine.
int64_t sampled_place(int64_t i, int64_t stride);

}  // namespace zeropg

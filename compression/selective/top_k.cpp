#include "compression/selective/top_k.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/platform/cpu/instruction_sets.h"
#include "compression/decimal.h"
#include "compression/selective/elias_gamma.h"
#include "compression/selective/top_k_selection.h"

namespace zeropg {

namespace {

const UsableKernels<TopKSet> kernels {
  {Instructions::kPortable, {"portable", portable_top_k}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_top_k}}, {Instructions::kAvx512, {"avx512", avx512_top_k}},
#endif
};

}  // namespace

std::span<const TopKSet> usable_top_k_sets() { return kernels.all(); }

TopK::TopK(double ratio, int64_t value_bits, bool exact, const TopKSet& set)
    : TopK(set.kernels(), ratio, value_bits, exact) {
  // Exact, so that what fits is sent whole; nearly all of a sum is zero, which a sample of it might not show.
  for_results_.reset(new TopK(kernels_, std::min(1.0, 4 * ratio), value_bits, true));
}

TopK::TopK(const TopKKernels& kernels, double ratio, int64_t value_bits, bool exact)
    : kernels_(kernels), ratio_(ratio), value_bits_(value_bits), exact_(exact), payload_(value_bits) {
  if (!(ratio > 0 && ratio <= 1)) {
    throw std::invalid_argument("top_k: ratio is " + shortest_decimal(ratio) + ", expected above 0 and up to 1");
  }
  if (value_bits != 8 && value_bits != 16 && value_bits != 32) {
    throw std::invalid_argument("top_k: value_bits is " + std::to_string(value_bits) + ", expected 32, 16 or 8");
  }
}

std::string TopK::description() const {
  return "top_k(ratio=" + shortest_decimal(ratio_) + ", value_bits=" + std::to_string(value_bits_) +
         ", exact=" + (exact_ ? "True" : "False") + ")";
}

int64_t TopK::entries_of(int64_t count) const {
  return static_cast<int64_t>(std::ceil(ratio_ * static_cast<double>(count)));
}

int64_t TopK::encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const {
  const SelectionRange range{values, residual};
  return encode_selected(select({&range, 1}), values, residual, encoded);
}

void TopK::decode(std::span<const std::byte> encoded, std::span<float> values) const {
  payload_.decode(encoded, values);
}

void TopK::decode_add(std::span<const std::byte> encoded, std::span<float> values) const {
  payload_.decode_add(encoded, values);
}

Selection TopK::select(std::span<const SelectionRange> ranges) const {
  const int64_t numel = numel_of(ranges);
  return numel == 0 ? Selection() : select_largest(kernels_, ranges, entries_of(numel), exact_, payload_.limit());
}

int64_t TopK::encode_selected(const Selection& selection, std::span<const float> values, std::span<float> residual,
                              std::span<std::byte> encoded) const {
  if (values.empty()) return 0;
  if (values.size() > kLargestGammaNumber) throw std::length_error("top_k: over 2^31 values in one encoding");
  if (!selection.is_finite) return TopKPayload::write_not_finite(encoded);
  const std::span<const float> sums = residual.empty() ? values : residual;
  return payload_.write(sums, selected_places(selection, static_cast<int64_t>(values.size())), residual, encoded);
}

const Compressor& TopK::for_results() const { return for_results_ ? *for_results_ : *this; }

}  // namespace zeropg

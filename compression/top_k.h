// The largest magnitudes only, each with its place: 1 % of the values take 1.1 % of fp32's bytes, or half of that with
// narrower values. What is not sent stays in the residual, so it is meant for use with error feedback.
//
// Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent"; Stich et al., "Sparsified SGD
// with Memory". Places are coded as in elias_gamma.h. The format and every edge case: README.md.
#pragma once

#include <memory>

#include "compression/compressor.h"
#include "compression/top_k_kernels.h"
#include "compression/top_k_payload.h"

namespace zeropg {

class TopK final : public Compressor {
 public:
  static constexpr char kHelp[] = R"(The largest values only: at 1 % of them 1.1 % of fp32's bytes, or 0.5 % in bytes.

    ratio: of the values, above 0 and up to 1. They are chosen among all that a rank contributes to a call.
    value_bits: 32 (fp32), 16 (bf16) or 8 (integers with a scale for each 256).
    exact: choose exactly that many. Otherwise as many as a sample of the values suggests, so about that many.

    The owner of a range sends sums of several ranks' values back at four times the ratio. Needs error feedback, and
    costs accuracy under Adam, which block_quant does not.

    Raises ValueError for other values.)";

  // `set` is for tests: it changes the speed, never the bits. std::invalid_argument.
  TopK(double ratio, int64_t value_bits, bool exact, const TopKSet& set = usable_top_k_sets().back());

  std::string description() const override;
  // Parts begin at multiples of cache lines and vectors.
  int64_t block_elements() const override { return 256; }
  int64_t capacity_bytes(int64_t count) const override { return payload_.capacity_bytes(count); }
  bool has_fixed_size() const override { return false; }
  int64_t typical_bytes(int64_t count) const override { return payload_.typical_bytes(count, entries_of(count)); }
  int64_t encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const override;
  void decode(std::span<const std::byte> encoded, std::span<float> values) const override;
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override;

  bool selects() const override { return true; }
  Selection select(std::span<const SelectionRange> ranges) const override;
  int64_t encode_selected(const Selection& selection, std::span<const float> values, std::span<float> residual,
                          std::span<std::byte> encoded) const override;
  const Compressor& for_results() const override;

 private:
  TopK(const TopKKernels& kernels, double ratio, int64_t value_bits, bool exact);

  int64_t entries_of(int64_t count) const;  // how many of `count` values are sent

  TopKKernels kernels_;
  double ratio_;
  int64_t value_bits_;
  bool exact_;
  TopKPayload payload_;
  // For sums: four ranks may have sent values at different places. Null in itself.
  std::unique_ptr<const TopK> for_results_;
};

}  // namespace zeropg

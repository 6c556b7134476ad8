#include "compression/top_k_selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

namespace zeropg {

namespace {

constexpr int64_t kChunk = 2048;
constexpr int64_t kBins = 1 << 15;         // a magnitude's upper 16 bits: exponent and 7 bits of mantissa
constexpr int64_t kMostSamples = 1 << 14;  // 164 of them are above the threshold of 1 %
constexpr uint32_t kNoBin = kBins;

uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffff; }

// The `rank`-th largest, counted from 1.
uint32_t nth_largest(std::span<uint32_t> magnitudes, int64_t rank) {
  std::nth_element(magnitudes.begin(), magnitudes.begin() + (rank - 1), magnitudes.end(), std::greater<>());
  return magnitudes[static_cast<size_t>(rank - 1)];
}

// The same where all agree in their upper 16 bits. Looks at each twice, whatever they are: a bin may hold all values.
uint32_t nth_largest_of_bin(std::span<const uint32_t> magnitudes, int64_t rank) {
  uint32_t prefix = magnitudes[0] & 0xffff0000;
  uint32_t mask = 0xffff0000;
  for (const int shift : {8, 0}) {
    std::array<int64_t, 256> counts{};
    for (const uint32_t magnitude : magnitudes) {
      if ((magnitude & mask) == prefix) ++counts[magnitude >> shift & 0xff];
    }
    uint32_t digit = 255;
    for (; counts[digit] < rank; --digit) rank -= counts[digit];
    prefix |= digit << shift;
    mask |= 0xffU << shift;
  }
  return prefix;
}

// Finds the threshold of what `ranges` hold in three passes: one that reads and counts, one that adds values to
// residuals, and where several values equal the threshold one that looks for the last of them that is sent.
//
// Only magnitudes above a floor are counted, which a sample suggests: then nearly all values cost a comparison.
class Selector {
 public:
  Selector(const TopKKernels& kernels, std::span<const SelectionRange> ranges, int64_t wanted)
      : kernels_(kernels), ranges_(ranges), numel_(numel_of(ranges)), wanted_(wanted) {}

  Selection select(bool is_exact, uint32_t limit) {
    sample();
    const int64_t rank = wanted_in_sample() + (is_exact ? margin() : 0);
    uint32_t floor = std::max<uint32_t>(sampled(rank), 1);
    count(floor);
    if (largest_ >= limit) return {0, 0, false};
    if (is_exact && counted_ < wanted_ && floor > 1) count(floor = 1);
    if (floor == 1 && counted_ <= wanted_) {  // all that is not zero
      add_and_find(kNoBin);
      return {0, 0, true};
    }
    return settle(is_exact || floor == 1 ? 0 : floor);
  }

 private:
  // With the sums as they will be; in order over the ranges, at places that no row length of a matrix is a multiple of.
  void sample() {
    if (numel_ < kMostSamples) return;
    const int64_t number = std::min(kMostSamples, numel_ / 8);
    const int64_t stride = numel_ / number;
    samples_.reserve(static_cast<size_t>(number));
    size_t range = 0;
    int64_t start = 0;
    for (int64_t i = 0; i < number; ++i) {
      const int64_t place = sampled_place(i, stride);
      while (place - start >= static_cast<int64_t>(ranges_[range].values.size())) {
        start += static_cast<int64_t>(ranges_[range++].values.size());
      }
      const auto at = static_cast<size_t>(place - start);
      const auto& [values, residual] = ranges_[range];
      samples_.push_back(magnitude_of(residual.empty() ? values[at] : values[at] + residual[at]));
    }
  }

  int64_t wanted_in_sample() const {
    return static_cast<int64_t>(
        std::ceil(static_cast<double>(wanted_) * static_cast<double>(samples_.size()) / static_cast<double>(numel_)));
  }
  // Four standard deviations of how many of the wanted ones are in a sample.
  int64_t margin() const { return 8 + static_cast<int64_t>(4 * std::sqrt(static_cast<double>(wanted_in_sample()))); }

  // 0 where there is no sample, or none so large.
  uint32_t sampled(int64_t rank) {
    return samples_.empty() || rank > static_cast<int64_t>(samples_.size()) ? 0 : nth_largest(samples_, rank);
  }

  // visit(values, residual or null, count), the ranges in order or from the end: each pass begins where the one before
  // has ended, with what the cache still holds.
  template <class Visit>
  void for_each_chunk(bool is_forward, Visit visit) const {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const auto& [values, residual] = ranges_[is_forward ? i : ranges_.size() - 1 - i];
      const auto size = static_cast<int64_t>(values.size());
      const int64_t chunks = (size + kChunk - 1) / kChunk;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t start = (is_forward ? chunk : chunks - 1 - chunk) * kChunk;
        visit(values.data() + start, residual.empty() ? nullptr : residual.data() + start,
              std::min(kChunk, size - start));
      }
    }
  }

  // Counts the magnitudes that are at least `floor`, by their upper 16 bits.
  void count(uint32_t floor) {
    bins_.assign(kBins, 0);
    counted_ = 0;
    for_each_chunk(/*is_forward=*/true, [&](const float* values, const float* residual, int64_t length) {
      const int64_t found = kernels_.magnitudes(values, residual, length, floor, found_.data(), &largest_);
      for (int64_t i = 0; i < found; ++i) ++bins_[found_[i] >> 16];
      counted_ += found;
    });
  }

  // Adds values to residuals and keeps the sums of one bin.
  void add_and_find(uint32_t bin) {
    const uint32_t least = std::max<uint32_t>(bin << 16, 1);
    for_each_chunk(/*is_forward=*/false, [&](const float* values, float* residual, int64_t length) {
      if (residual != nullptr) kernels_.add(values, residual, length);
      const float* sums = residual != nullptr ? residual : values;
      uint32_t largest = 0;
      const int64_t found = kernels_.magnitudes(sums, nullptr, length, least, found_.data(), &largest);
      for (int64_t i = 0; i < found; ++i) {
        if (found_[i] >> 16 == bin) of_bin_.push_back(found_[i]);
      }
    });
  }

  // `threshold`: of a sample, or 0 for the exact one.
  Selection settle(uint32_t threshold) {
    int64_t above = 0;
    int64_t bin = kBins - 1;
    while (threshold != 0 ? bin > threshold >> 16 : above + bins_[bin] < wanted_) above += bins_[bin--];
    add_and_find(static_cast<uint32_t>(bin));
    if (threshold == 0) threshold = nth_largest_of_bin(of_bin_, wanted_ - above);
    int64_t equal = 0;
    for (const uint32_t magnitude : of_bin_) {
      above += magnitude > threshold;
      equal += magnitude == threshold;
    }
    const int64_t ties = std::max<int64_t>(wanted_ - above, 0);
    return {threshold, equal <= ties ? numel_ : place_after_ties(threshold, ties), true};
  }

  // The place behind the `ties`-th value that equals the threshold.
  int64_t place_after_ties(uint32_t threshold, int64_t ties) {
    if (ties == 0) return 0;
    int64_t start = 0;
    for (const auto& [values, residual] : ranges_) {
      const float* sums = residual.empty() ? values.data() : residual.data();
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) {
        const int64_t found = kernels_.places(sums + i, std::min(kChunk, size - i), threshold, 0, found_.data());
        for (int64_t j = 0; j < found; ++j) {
          if (magnitude_of(sums[i + found_[j]]) == threshold && --ties == 0) return start + i + found_[j] + 1;
        }
      }
      start += size;
    }
    return start;
  }

  const TopKKernels& kernels_;
  std::span<const SelectionRange> ranges_;
  int64_t numel_;
  int64_t wanted_;
  std::vector<uint32_t> samples_;
  std::vector<int64_t> bins_;
  int64_t counted_ = 0;
  uint32_t largest_ = 0;
  std::vector<uint32_t> of_bin_;
  std::array<uint32_t, kChunk + kTopKSlack> found_;
};

}  // namespace

int64_t sampled_place(int64_t i, int64_t stride) {
  auto number = static_cast<uint64_t>(i);
  number = (number ^ number >> 33) * 0xff51afd7ed558ccdULL;
  number = (number ^ number >> 33) * 0xc4ceb9fe1a85ec53ULL;
  number ^= number >> 33;
  return i * stride + static_cast<int64_t>(number % static_cast<uint64_t>(stride));
}

int64_t numel_of(std::span<const SelectionRange> ranges) {
  int64_t numel = 0;
  for (const SelectionRange& range : ranges) numel += static_cast<int64_t>(range.values.size());
  return numel;
}

Selection select_largest(const TopKKernels& kernels, std::span<const SelectionRange> ranges, int64_t wanted,
                         bool is_exact, uint32_t limit) {
  return Selector(kernels, ranges, wanted).select(is_exact, limit);
}

std::vector<uint32_t> selected_places(const TopKKernels& kernels, const Selection& selection,
                                      std::span<const float> values, int64_t expected) {
  const auto size = static_cast<int64_t>(values.size());
  const int64_t ties_end = std::clamp<int64_t>(selection.tie_limit, 0, size);
  std::vector<uint32_t> places(static_cast<size_t>(expected + kChunk + kTopKSlack));
  int64_t found = 0;
  const auto find = [&](int64_t start, int64_t stop, uint32_t at_least) {
    for (; start < stop; start += kChunk) {
      if (static_cast<int64_t>(places.size()) < found + kChunk + kTopKSlack) places.resize(2 * places.size());
      found += kernels.places(values.data() + start, std::min(kChunk, stop - start), at_least,
                              static_cast<uint32_t>(start), places.data() + found);
    }
  };
  find(0, ties_end, std::max<uint32_t>(selection.threshold_bits, 1));
  find(ties_end, size, selection.threshold_bits + 1);
  places.resize(static_cast<size_t>(found));
  return places;
}

}  // namespace zeropg

#include "compression/selective/top_k_selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

namespace zeropg {

namespace {

constexpr int64_t kChunk = 2048;
// Values in a sample: of the larger one 164 are above the threshold of 1 %, so about 8 % more or fewer than wanted are
// sent; of the other one enough for a floor.
constexpr int64_t kMostSamples = 1 << 14;
constexpr int64_t kMostSamplesOfFloor = 1 << 12;

uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffff; }

// The `rank`-th largest, counted from 1.
uint32_t nth_largest(std::span<uint32_t> magnitudes, int64_t rank) {
  std::nth_element(magnitudes.begin(), magnitudes.begin() + (rank - 1), magnitudes.end(), std::greater<>());
  return magnitudes[static_cast<size_t>(rank - 1)];
}

// Of the magnitudes whose bits above the digit are `prefix`, the `rank`-th largest, counted from 1: its digit, kBits
// from `shift` on. `rank` becomes that among those which have the digit.
template <int kBits>
uint32_t digit_of_rank(std::span<const uint32_t> magnitudes, uint32_t prefix, int shift, int64_t& rank) {
  std::array<int64_t, size_t{1} << kBits> counts{};
  for (const uint32_t magnitude : magnitudes) {
    const uint32_t digit = magnitude >> shift & ((1U << kBits) - 1);
    if (static_cast<uint64_t>(magnitude) >> (shift + kBits) == prefix) ++counts[digit];
  }
  size_t digit = counts.size() - 1;
  for (; counts[digit] < rank; --digit) rank -= counts[digit];
  return static_cast<uint32_t>(digit);
}

// Room behind the first `size` entries for what a kernel finds in a chunk.
uint32_t* room_for_chunk(std::vector<uint32_t>& entries, int64_t size) {
  const auto needed = static_cast<size_t>(size + kChunk + kTopKSlack);
  if (entries.size() < needed) entries.resize(2 * needed);
  return entries.data() + size;
}

// Finds the threshold of what `ranges` hold in one pass over memory, which adds values to residuals on its way. Where
// several values equal the threshold another one looks for the last of them that is sent.
//
// It keeps the magnitudes from a floor on, which a sample suggests: nearly all values cost a comparison.
class Selector {
 public:
  Selector(const TopKKernels& kernels, std::span<const SelectionRange> ranges, int64_t wanted)
      : kernels_(kernels), ranges_(ranges), numel_(numel_of(ranges)), wanted_(wanted) {}

  Selection select(bool is_exact, uint32_t limit) {
    sample(is_exact ? kMostSamplesOfFloor : kMostSamples);
    const int64_t rank = wanted_in_sample() + (is_exact ? margin() : 0);
    const uint32_t floor = std::max<uint32_t>(sampled(rank), 1);
    if (!find_and_add(floor, limit)) return {0, 0, false};
    if (is_exact && found_ < wanted_ && floor > 1) find(1);
    if (found_ <= wanted_ && !(floor > 1 && !is_exact)) return {0, 0, true};  // all that is not zero
    return settle(is_exact || floor == 1 ? exact_threshold() : floor);
  }

 private:
  // With the sums as they will be; in order over the ranges, at places that no row length of a matrix is a multiple of.
  void sample(int64_t most) {
    const int64_t number = std::min(most, numel_ / 8);
    if (number < most / 16) return;  // of so few values a sample costs more than it saves, or says too little
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

  // Keeps the magnitudes that are at least `floor`, and adds values to residuals, while the cache holds both. False
  // where one is `limit` or more: then residuals are what they were, to a rounding.
  bool find_and_add(uint32_t floor, uint32_t limit) {
    for (size_t range = 0; range < ranges_.size(); ++range) {
      const auto& [values, residual] = ranges_[range];
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) {
        const int64_t count = std::min(kChunk, size - i);
        if (find_in(values.data() + i, residual.empty() ? nullptr : residual.data() + i, count, floor) >= limit) {
          take_back(range, i);
          return false;
        }
        if (!residual.empty()) kernels_.add(values.data() + i, residual.data() + i, count);
      }
    }
    return true;
  }

  // The same of the sums, which are there by now.
  void find(uint32_t floor) {
    found_ = 0;
    for (const auto& [values, residual] : ranges_) {
      const float* sums = residual.empty() ? values.data() : residual.data();
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) find_in(sums + i, nullptr, std::min(kChunk, size - i), floor);
    }
  }

  uint32_t find_in(const float* values, const float* residual, int64_t count, uint32_t floor) {
    uint32_t largest = 0;
    found_ += kernels_.magnitudes(values, residual, count, floor, room_for_chunk(magnitudes_, found_), &largest);
    return largest;
  }

  // Of the ranges before `last`, and of that one up to `stop`.
  void take_back(size_t last, int64_t stop) const {
    for (size_t range = 0; range <= last; ++range) {
      const auto& [values, residual] = ranges_[range];
      const size_t end = range < last ? residual.size() : std::min(residual.size(), static_cast<size_t>(stop));
      for (size_t i = 0; i < end; ++i) residual[i] -= values[i];
    }
  }

  // Digit by digit, of 11, 10 and 10 bits, from the highest one.
  uint32_t exact_threshold() const {
    const std::span magnitudes(magnitudes_.data(), static_cast<size_t>(found_));
    int64_t rank = wanted_;
    uint32_t threshold = digit_of_rank<11>(magnitudes, 0, 20, rank);
    threshold = threshold << 10 | digit_of_rank<10>(magnitudes, threshold, 10, rank);
    return threshold << 10 | digit_of_rank<10>(magnitudes, threshold, 0, rank);
  }

  Selection settle(uint32_t threshold) {
    int64_t above = 0;
    int64_t equal = 0;
    for (int64_t i = 0; i < found_; ++i) {
      above += magnitudes_[i] > threshold;
      equal += magnitudes_[i] == threshold;
    }
    const int64_t ties = std::max<int64_t>(wanted_ - above, 0);
    return {threshold, equal <= ties ? numel_ : place_after_ties(threshold, ties), true};
  }

  // The place behind the `ties`-th value that equals the threshold.
  int64_t place_after_ties(uint32_t threshold, int64_t ties) const {
    if (ties == 0) return 0;
    std::array<uint32_t, kChunk + kTopKSlack> places;
    int64_t start = 0;
    for (const auto& [values, residual] : ranges_) {
      const float* sums = residual.empty() ? values.data() : residual.data();
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) {
        const int64_t found = kernels_.places(sums + i, std::min(kChunk, size - i), threshold, 0, places.data());
        for (int64_t j = 0; j < found; ++j) {
          if (magnitude_of(sums[i + places[j]]) == threshold && --ties == 0) return start + i + places[j] + 1;
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
  std::vector<uint32_t> magnitudes_;  // the first `found_`
  int64_t found_ = 0;
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
      found += kernels.places(values.data() + start, std::min(kChunk, stop - start), at_least,
                              static_cast<uint32_t>(start), room_for_chunk(places, found));
    }
  };
  find(0, ties_end, std::max<uint32_t>(selection.threshold_bits, 1));
  find(ties_end, size, selection.threshold_bits + 1);
  places.resize(static_cast<size_t>(found));
  return places;
}

}  // namespace zeropg

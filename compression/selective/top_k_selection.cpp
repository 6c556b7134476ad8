#include "compression/selective/top_k_selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>

namespace zeropg {

namespace {

constexpr int64_t kChunk = 1024;  // with its residuals it stays in the first cache
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

// Magnitudes that may be among the largest, and their places. Kept for the thread's next selection: of fresh memory
// each page costs a fault, which would be a third of the time.
class Candidates {
 public:
  // For the kernel to write what it finds in a chunk, behind the first `size`.
  void make_room(int64_t size) {
    const auto needed = static_cast<size_t>(size + kChunk + kTopKSlack);
    if (magnitudes_.size() >= needed) return;
    magnitudes_.resize(2 * needed);
    places_.resize(2 * needed);
  }
  uint32_t* magnitudes() { return magnitudes_.data(); }
  int64_t* places() { return places_.data(); }
  void end() {
    constexpr size_t kMostKept = size_t{1} << 23;
    if (magnitudes_.size() > kMostKept) *this = Candidates();
  }

 private:
  std::vector<uint32_t> magnitudes_;
  std::vector<int64_t> places_;
};

thread_local Candidates candidates_of_thread;

// Selects in one pass over memory, which adds values to residuals on its way. It keeps magnitudes from a floor on,
// which a sample suggests, and their places: nearly all values cost a comparison.
class Selector {
 public:
  Selector(const TopKKernels& kernels, std::span<const SelectionRange> ranges, int64_t wanted)
      : kernels_(kernels), ranges_(ranges), numel_(numel_of(ranges)), wanted_(wanted) {}

  Selection select(bool is_exact, uint32_t limit) {
    sample(is_exact ? kMostSamplesOfFloor : kMostSamples);
    const int64_t rank = wanted_in_sample() + (is_exact ? margin() : 0);
    const uint32_t floor = std::max<uint32_t>(sampled(rank), 1);
    if (!find_and_add(floor, limit)) return {nullptr, false};
    if (is_exact && found_ < wanted_ && floor > 1) find(1);
    if (found_ > wanted_) {  // otherwise all that is not zero, or as many as the sample says
      if (is_exact || floor == 1) {
        keep_largest();
      } else {
        keep(floor, std::max<int64_t>(wanted_ - above(floor), 0));
      }
    }
    const int64_t* places = candidates_.places();
    Selection selection{std::make_shared<const std::vector<int64_t>>(places, places + found_)};
    candidates_.end();
    return selection;
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

  // Finds the magnitudes that are at least `floor`, and adds values to residuals, while the cache holds both. False
  // where one is `limit` or more: then residuals are what they were, to a rounding.
  bool find_and_add(uint32_t floor, uint32_t limit) {
    int64_t start = 0;
    for (size_t range = 0; range < ranges_.size(); ++range) {
      const auto& [values, residual] = ranges_[range];
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) {
        const int64_t count = std::min(kChunk, size - i);
        const float* residuals = residual.empty() ? nullptr : residual.data() + i;
        if (find_in(values.data() + i, residuals, count, floor, start + i) >= limit) {
          take_back(range, i);
          return false;
        }
        if (!residual.empty()) kernels_.add(values.data() + i, residual.data() + i, count);
      }
      start += size;
    }
    return true;
  }

  // The same of the sums, which are there by now.
  void find(uint32_t floor) {
    found_ = 0;
    int64_t start = 0;
    for (const auto& [values, residual] : ranges_) {
      const float* sums = residual.empty() ? values.data() : residual.data();
      const auto size = static_cast<int64_t>(values.size());
      for (int64_t i = 0; i < size; i += kChunk) {
        find_in(sums + i, nullptr, std::min(kChunk, size - i), floor, start + i);
      }
      start += size;
    }
  }

  // In a chunk that begins at place `start`; returns the largest magnitude there.
  uint32_t find_in(const float* values, const float* residual, int64_t count, uint32_t floor, int64_t start) {
    uint32_t largest = 0;
    std::array<uint32_t, kChunk + kTopKSlack> indices;
    candidates_.make_room(found_);
    const int64_t found =
        kernels_.find(values, residual, count, floor, candidates_.magnitudes() + found_, indices.data(), &largest);
    int64_t* const places = candidates_.places() + found_;
    for (int64_t i = 0; i < found; ++i) places[i] = start + indices[static_cast<size_t>(i)];
    found_ += found;
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

  // Of what was found the `wanted_` largest. The smallest of them is found digit by digit, of 11, 10 and 10 bits, from
  // the highest one.
  void keep_largest() {
    const std::span<const uint32_t> magnitudes(candidates_.magnitudes(), static_cast<size_t>(found_));
    int64_t ties = wanted_;
    uint32_t threshold = digit_of_rank<11>(magnitudes, 0, 20, ties);
    threshold = threshold << 10 | digit_of_rank<10>(magnitudes, threshold, 10, ties);
    threshold = threshold << 10 | digit_of_rank<10>(magnitudes, threshold, 0, ties);
    keep(threshold, ties);
  }

  int64_t above(uint32_t threshold) const {
    const uint32_t* magnitudes = candidates_.magnitudes();
    return std::count_if(magnitudes, magnitudes + found_, [&](uint32_t magnitude) { return magnitude > threshold; });
  }

  // Those above `threshold`, and the first `ties` of those that equal it.
  void keep(uint32_t threshold, int64_t ties) {
    const uint32_t* magnitudes = candidates_.magnitudes();
    int64_t* places = candidates_.places();
    int64_t kept = 0;
    for (int64_t i = 0; i < found_; ++i) {
      // In arithmetic: which way a branch goes would be as good as random.
      const bool is_tie = magnitudes[i] == threshold;
      places[kept] = places[i];
      kept += static_cast<int64_t>(magnitudes[i] > threshold) + static_cast<int64_t>(is_tie & (ties > 0));
      ties -= is_tie;
    }
    found_ = kept;
  }

  const TopKKernels& kernels_;
  std::span<const SelectionRange> ranges_;
  int64_t numel_;
  int64_t wanted_;
  std::vector<uint32_t> samples_;
  Candidates& candidates_ = candidates_of_thread;  // the first `found_`
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

std::vector<uint32_t> selected_places(const Selection& selection, int64_t count) {
  if (selection.places == nullptr) return {};
  const auto first = std::lower_bound(selection.places->begin(), selection.places->end(), selection.start);
  const auto last = std::lower_bound(first, selection.places->end(), selection.start + count);
  std::vector<uint32_t> places(static_cast<size_t>(last - first));
  std::transform(first, last, places.begin(),
                 [&](int64_t place) { return static_cast<uint32_t>(place - selection.start); });
  return places;
}

}  // namespace zeropg

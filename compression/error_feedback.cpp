#include "compression/error_feedback.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace zeropg {

namespace {

int64_t size_of(const std::shared_ptr<std::vector<float>>& values) { return static_cast<int64_t>(values->size()); }

void check_finite(const std::string& name, std::span<const float> values) {
  if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); })) {
    throw std::invalid_argument("residuals of '" + name + "': a value is not finite, expected what a run has saved");
  }
}

}  // namespace

std::vector<ResidualSegment> ResidualStore::reserve(const std::string& name, int32_t hop, int64_t start, int64_t stop) {
  std::vector<ResidualSegment> result;
  if (start >= stop) return result;
  std::lock_guard<std::mutex> lock(mutex_);
  Segments& known = segments_[Key(name, hop)];
  auto next = known.upper_bound(start);
  if (next != known.begin() && std::prev(next)->first + size_of(std::prev(next)->second) > start) --next;
  for (int64_t position = start; position < stop;) {
    if (next == known.end() || next->first > position) {
      const int64_t end = next == known.end() ? stop : std::min(stop, next->first);
      next = known.emplace_hint(next, position, std::make_shared<std::vector<float>>(end - position, 0.0f));
    }
    result.push_back({name, hop, next->first, next->second});
    position = next->first + size_of(next->second);
    ++next;
  }
  return result;
}

std::vector<ResidualSegment> ResidualStore::segments() const {
  std::vector<ResidualSegment> result;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, segments] : segments_) {
    for (const auto& [start, values] : segments) result.push_back({key.first, key.second, start, values});
  }
  return result;
}

void ResidualStore::load(const std::string& name, int32_t hop, int64_t start, std::span<const float> values) {
  check_finite(name, values);
  change(name, hop, start, values, [](float, float value) { return value; });
}

void ResidualStore::owe(const std::string& name, int64_t start, std::span<const float> values) {
  check_finite(name, values);
  change(name, kArrearsHop, start, values, [](float owed, float value) { return owed + value; });
}

template <typename Function>
void ResidualStore::change(const std::string& name, int32_t hop, int64_t start, std::span<const float> values,
                           Function&& changed) {
  const int64_t stop = start + static_cast<int64_t>(values.size());
  for (const ResidualSegment& segment : reserve(name, hop, start, stop)) {
    const int64_t from = std::max(start, segment.start);
    const int64_t to = std::min(stop, segment.start + size_of(segment.values));
    float* known = segment.values->data() + (from - segment.start);
    std::transform(known, known + (to - from), values.begin() + (from - start), known, changed);
  }
}

void ResidualStore::retire(const std::string& name, int32_t hop, int64_t start, int64_t stop,
                           std::span<const ElementRange> kept, float factor) {
  std::vector<std::pair<int64_t, std::vector<float>>> owed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = segments_.find(Key(name, hop));
    if (found == segments_.end()) return;
    for (auto segment = found->second.begin(); segment != found->second.end();) {
      const int64_t first = segment->first;
      std::vector<float>& values = *segment->second;
      const int64_t from = std::max(start, first);
      const int64_t to = std::min(stop, first + size_of(segment->second));
      bool is_kept = to - from < size_of(segment->second);  // in part, and so the segment
      const auto take_out = [&](int64_t begin, int64_t end) {
        if (begin >= end) return;
        float* lost = values.data() + (begin - first);
        const int64_t count = end - begin;
        if (std::any_of(lost, lost + count, [](float value) { return value != 0; })) {
          owed.emplace_back(begin, std::vector<float>(lost, lost + count));
          std::fill_n(lost, count, 0.0f);
        }
      };
      int64_t position = from;
      for (const ElementRange& each : kept) {
        if (each.stop <= from || each.start >= to) continue;
        is_kept = true;
        take_out(position, std::min(each.start, to));
        position = std::max(position, each.stop);
      }
      take_out(position, to);
      segment = is_kept || from >= to ? std::next(segment) : found->second.erase(segment);
    }
    if (found->second.empty()) segments_.erase(found);
  }
  for (auto& [begin, values] : owed) {
    for (float& value : values) value *= factor;
    owe(name, begin, values);
  }
}

bool ResidualStore::has_arrears() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const auto& entry) { return entry.first.second == kArrearsHop; });
}

std::vector<ResidualSegment> ResidualStore::take(const std::string& name, int32_t hop) {
  std::vector<ResidualSegment> result;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = segments_.find(Key(name, hop));
  if (found == segments_.end()) return result;
  for (const auto& [start, values] : found->second) result.push_back({name, hop, start, values});
  segments_.erase(found);
  return result;
}

void ResidualStore::scale(float factor) {
  if (!std::isfinite(factor) || factor <= 0) {
    throw std::invalid_argument("residuals: they are to be multiplied by " + std::to_string(factor) +
                                ", expected a finite number above 0: the new loss scale over the old one");
  }
  for (const ResidualSegment& segment : segments()) {
    for (float& value : *segment.values) value *= factor;
  }
}

void ResidualStore::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  segments_.clear();
}

int64_t ResidualStore::bytes() const {
  int64_t bytes = 0;
  for (const ResidualSegment& segment : segments()) bytes += 4 * size_of(segment.values);
  return bytes;
}

}  // namespace zeropg

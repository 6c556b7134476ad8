#include "backend/group/residual_map.h"

#include <algorithm>

#include "backend/collectives/schedule/schedule_cursor.h"

namespace zeropg {

namespace {

using Interval = ElementRange;

constexpr int64_t kFloatBytes = sizeof(float);

// What the schedule encodes with residuals, by hop, neighbours joined.
std::map<int32_t, std::vector<Interval>> encoded_intervals(const Schedule& schedule) {
  std::map<int32_t, std::vector<Interval>> intervals;
  for (const Step& step : schedule.steps) {
    if (step.kind != StepKind::kEncode || step.residual.space != Space::kResidual) continue;
    for (int64_t chunk = 0; chunk < step.chunks; ++chunk) {
      const Step one = step_of_chunk(step, chunk);
      const int64_t start = one.residual.offset_bytes / kFloatBytes;
      intervals[step.residual.index].push_back({start, start + one.bytes / kFloatBytes});
    }
  }
  for (auto& [hop, list] : intervals) {
    std::sort(list.begin(), list.end(), [](const Interval& a, const Interval& b) { return a.start < b.start; });
    std::vector<Interval> joined;
    for (const Interval& interval : list) {
      if (!joined.empty() && interval.start <= joined.back().stop) {
        joined.back().stop = std::max(joined.back().stop, interval.stop);
      } else {
        joined.push_back(interval);
      }
    }
    list = std::move(joined);
  }
  return intervals;
}

// What the store has of the request's elements where the schedule encodes nothing at that hop.
void retire(const Compression& compression, int32_t hop, const std::map<int32_t, std::vector<Interval>>& encoded,
            float factor) {
  const auto found = encoded.find(hop);
  const std::span<const Interval> intervals = found == encoded.end() ? std::span<const Interval>() : found->second;
  auto next = intervals.begin();
  int64_t start = 0;
  std::vector<Interval> kept;
  for (const ResidualRange& range : compression.ranges) {
    const int64_t stop = start + range.numel;
    const int64_t shift = start - range.start;  // from elements of the name to those of the request
    kept.clear();
    while (next != intervals.end() && next->stop <= start) ++next;
    for (auto each = next; each != intervals.end() && each->start < stop; ++each) {
      kept.push_back({std::max(each->start, start) - shift, std::min(each->stop, stop) - shift});
    }
    if (!range.name.empty()) {
      compression.residuals->retire(range.name, hop, range.start, range.start + range.numel, kept, factor);
    }
    start = stop;
  }
}

}  // namespace

ResidualMap::ResidualMap(const Schedule& schedule, const Compression& compression, float result_factor) {
  if (compression.residuals == nullptr) return;
  const std::map<int32_t, std::vector<Interval>> encoded = encoded_intervals(schedule);
  retire(compression, kContributionHop, encoded, compression.arrears_factor);
  retire(compression, kResultHop, encoded, compression.arrears_factor * result_factor);
  for (const auto& [hop, intervals] : encoded) {
    for (const Interval& interval : intervals) reserve(compression, hop, interval.start, interval.stop);
  }
}

void ResidualMap::reserve(const Compression& compression, int32_t hop, int64_t start, int64_t stop) {
  int64_t range_start = 0;
  for (const ResidualRange& range : compression.ranges) {
    const int64_t from = std::max(start, range_start);
    const int64_t to = std::min(stop, range_start + range.numel);
    if (from < to && !range.name.empty()) {
      const int64_t shift = range_start - range.start;  // from elements of the name to those of the request
      for (ResidualSegment& segment : compression.residuals->reserve(range.name, hop, from - shift, to - shift)) {
        const int64_t begin = std::max(from, segment.start + shift);
        const int64_t end = std::min(to, segment.start + shift + static_cast<int64_t>(segment.values->size()));
        const std::span<float> values =
            std::span(*segment.values)
                .subspan(static_cast<size_t>(begin - shift - segment.start), static_cast<size_t>(end - begin));
        pieces_[hop].push_back({begin, values, std::move(segment)});
      }
    }
    range_start += range.numel;
  }
}

int64_t ResidualMap::encode(const Compressor& codec, const Selection* selection, std::span<const float> values,
                            int32_t hop, int64_t start, std::span<std::byte> encoded) {
  const auto encode_with = [&](std::span<float> residual) {
    return selection == nullptr ? codec.encode(values, residual, encoded)
                                : codec.encode_selected(*selection, values, residual, encoded);
  };
  const std::vector<Piece>& pieces = pieces_[hop];
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), start,
                                [](int64_t position, const Piece& each) { return position < each.start; });
  if (piece != pieces.begin()) {
    --piece;
    const int64_t offset = start - piece->start;
    if (offset + static_cast<int64_t>(values.size()) <= static_cast<int64_t>(piece->values.size())) {
      return encode_with(piece->values.subspan(static_cast<size_t>(offset), values.size()));
    }
  }
  // Elements without residuals: where values have been selected from, residuals hold the values already.
  gathered_.assign(values.size(), 0.0f);
  if (selection != nullptr) std::copy(values.begin(), values.end(), gathered_.begin());
  exchange(hop, start, /*is_read=*/true);
  const int64_t length = encode_with(gathered_);
  exchange(hop, start, /*is_read=*/false);
  return length;
}

Selection ResidualMap::select(const Compressor& codec, std::span<const float> values, int32_t hop,
                              int64_t start) const {
  std::vector<SelectionRange> ranges;
  int64_t position = start;
  const int64_t stop = start + static_cast<int64_t>(values.size());
  const auto values_between = [&](int64_t from, int64_t to) {
    return values.subspan(static_cast<size_t>(from - start), static_cast<size_t>(to - from));
  };
  if (const auto found = pieces_.find(hop); found != pieces_.end()) {
    for (const Piece& piece : found->second) {
      const int64_t from = std::max(position, piece.start);
      const int64_t to = std::min(stop, piece.start + static_cast<int64_t>(piece.values.size()));
      if (from >= to) continue;
      if (position < from) ranges.push_back({values_between(position, from), {}});
      ranges.push_back({values_between(from, to),
                        piece.values.subspan(static_cast<size_t>(from - piece.start), static_cast<size_t>(to - from))});
      position = to;
    }
  }
  if (position < stop) ranges.push_back({values_between(position, stop), {}});
  return codec.select(ranges);
}

// Copies the residuals of elements [start, start + gathered_.size()) together, or back to where they belong.
void ResidualMap::exchange(int32_t hop, int64_t start, bool is_read) {
  const int64_t stop = start + static_cast<int64_t>(gathered_.size());
  const std::vector<Piece>& pieces = pieces_[hop];
  auto piece = std::lower_bound(pieces.begin(), pieces.end(), start, [](const Piece& each, int64_t position) {
    return each.start + static_cast<int64_t>(each.values.size()) <= position;
  });
  for (; piece != pieces.end() && piece->start < stop; ++piece) {
    const int64_t from = std::max(start, piece->start);
    const int64_t to = std::min(stop, piece->start + static_cast<int64_t>(piece->values.size()));
    float* kept = piece->values.data() + (from - piece->start);
    float* gathered = gathered_.data() + (from - start);
    if (is_read) {
      std::copy_n(kept, to - from, gathered);
    } else {
      std::copy_n(gathered, to - from, kept);
    }
  }
}

}  // namespace zeropg

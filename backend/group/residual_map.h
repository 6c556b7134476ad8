// Where the residuals of one request's elements are.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "backend/collectives/schedule/schedule.h"
#include "backend/group/collective_args.h"
#include "compression/error_feedback.h"

namespace zeropg {

// Elements are counted over the whole input of the request; the names and offsets that a store knows them by are
// ResidualRange's. Room is made for what the schedule encodes on this rank, and for nothing else.
class ResidualMap {
 public:
  // Nothing without residuals in `compression`. Call it when the operation begins, not before: another one of the same
  // data may still run. What earlier operations left where this one encodes nothing becomes arrears. `result_factor`:
  // how many contributions a unit of the result is worth: the world size of an average.
  ResidualMap(const Schedule& schedule, const Compression& compression, float result_factor);

  // Compressor::encode with the residuals of elements [start, start + values.size()), or encode_selected.
  int64_t encode(const Compressor& codec, const Selection* selection, std::span<const float> values, int32_t hop,
                 int64_t start, std::span<std::byte> encoded);
  // Compressor::select with the residuals of the elements from `start`.
  Selection select(const Compressor& codec, std::span<const float> values, int32_t hop, int64_t start) const;

 private:
  struct Piece {
    int64_t start;            // in the request's elements
    std::span<float> values;  // of `segment`
    ResidualSegment segment;  // keeps them
  };
  void reserve(const Compression& compression, int32_t hop, int64_t start, int64_t stop);
  void exchange(int32_t hop, int64_t start, bool is_read);

  std::map<int32_t, std::vector<Piece>> pieces_;  // by hop; by start; they do not overlap
  std::vector<float> gathered_;                   // of values whose residuals lie in several pieces
};

}  // namespace zeropg

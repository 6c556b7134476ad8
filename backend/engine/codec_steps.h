// The steps of a schedule in which floats become bytes and bytes become floats.
#pragma once

#include <chrono>
#include <cstddef>

#include "backend/group/planner.h"
#include "backend/group/residual_map.h"
#include "compression/codec_meter.h"

namespace zeropg {

// Of one execution of `collective`, which must have a codec where any of these is called, and must outlive this.
// `source` and `destination` are where the step's regions lie.
class CodecSteps {
 public:
  explicit CodecSteps(const PlannedCollective& collective);

  void select(const Step& step, const std::byte* source);  // for the encodings of contributions that follow
  void encode(const Step& step, const std::byte* source, std::byte* destination);
  void decode(const Step& step, const std::byte* source, std::byte* destination);  // or adds what it decodes

  CodecCounters counters() const;  // since the execution began

 private:
  using Clock = std::chrono::steady_clock;

  const PlannedCollective& collective_;
  ResidualMap residuals_;
  Selection selection_;
  bool has_selection_ = false;
  CodecCounters counters_;  // but for the whole time
  const Clock::time_point start_ = Clock::now();
};

}  // namespace zeropg

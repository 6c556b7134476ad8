// Broadcast: the root stages its tensor, the others copy it out. One barrier per chunk.
#include <algorithm>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_broadcast_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "broadcast_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto stage = [&](Schedule& schedule, int64_t chunk, Range range) {
    if (spec.rank != spec.root) return;
    add_copy(schedule, staging(spec.root, chunk, 0), input(range.offset_bytes), range.bytes);
  };
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  const auto take = [&](Schedule& schedule, int64_t chunk, Range range) {
    if (spec.rank == spec.root) return;
    add_long_copy(schedule, output(range.offset_bytes), staging(spec.root, chunk, 0), range.bytes, is_streaming);
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, stage, take);
}

Cost cost_broadcast_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {
      .barriers = chunks, .memory_bytes = 2.0 * spec.bytes, .far_bytes = far_ranks(spec) > 0 ? 1.0 * spec.bytes : 0};
}

}  // namespace zeropg

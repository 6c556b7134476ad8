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
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank != spec.root) return;
    add_copy(stage, staging(spec.root, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  };
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  const auto copy_out = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank == spec.root) return;
    add_long_copy(stage, with_stride(output(0), chunks.bytes), staging(spec.root, 0, 0), chunks, is_streaming);
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, copy_in, copy_out);
}

Cost cost_broadcast_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {
      .barriers = chunks, .memory_bytes = 2.0 * spec.bytes, .far_bytes = far_ranks(spec) > 0 ? 1.0 * spec.bytes : 0};
}

}  // namespace zeropg

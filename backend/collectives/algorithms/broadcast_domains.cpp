// Broadcast over the domains of one node: the root stages its tensor, which its domain copies out; each other domain
// fetches it once, shared by its ranks, and copies out of its own slots one barrier later.
//
// On banks: between two barriers the root stages chunk t + 1 while others still copy chunk t - 1 out of the same bank,
// but of the slots of other domains, where no root is.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/domain_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

namespace {

Chunks chunks_of(const CollectiveSpec& spec) {
  const Pieces piece = cut_chunk(spec, 1);
  return equal_chunks(spec.bytes, piece.bytes, piece.alignment);
}

}  // namespace

Schedule plan_broadcast_domains(const CollectiveSpec& spec) {
  const Chunks chunks = chunks_of(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_one_part(placement, chunks.bytes, cut_chunk(spec, 1).alignment);
  const SlotLayout slots(layout);
  const NodeLayout in_domain{placement, layout, slots};
  Schedule schedule = make_schedule("broadcast_domains", chunks.count);
  if (chunks.count == 0) return schedule;
  const bool is_near_root = placement.node() == placement.node_of(spec.root);
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, chunks.count); };
  const std::vector<Extent> outputs = extents_of_range(output(0), chunks);
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  add_barrier({schedule, 1, chunks.count + 1});
  if (spec.rank == spec.root) {
    add_copy(stage(0), staging(spec.root, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  } else if (is_near_root) {
    add_long_copy(stage(1), with_stride(output(0), chunks.bytes), staging(spec.root, 0, 0), chunks, is_streaming);
  } else {
    for (const Extent& extent : cut(outputs, layout.own_slice(0))) {
      const int64_t place = extent.places.offset_bytes;
      add_copy(stage(1), staging(spec.rank, 0, place), staging(spec.root, 0, place), extent.bytes());
    }
    copy_out(stage(2), outputs, in_domain, is_streaming);
  }
  return schedule;
}

// Fetch a share, copy all out.
Cost cost_broadcast_domains(const CollectiveSpec& spec) {
  const double share = 1.0 / smallest_domain_size(spec) * spec.bytes;
  return {.barriers = chunks_of(spec).count + 1.0, .memory_bytes = 2.0 * spec.bytes + 2 * share, .far_bytes = share};
}

}  // namespace zeropg

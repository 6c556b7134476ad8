// All-gather over the domains of one node: every rank stages its block, each domain fetches the blocks of the others
// once, shared by its ranks, and all copy out of their own domain's slots.
//
// Note [Pipeline between domains] in all_reduce_domains.cpp, with its last two stages: blocks are staged where
// completed pieces would be.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/domain_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_all_gather_domains(const CollectiveSpec& spec) {
  const DomainPieces pieces = cut_blocks_over_domains(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const SlotLayout slots(layout);
  const NodeLayout in_domain{placement, layout, slots};
  const DomainPhases between(spec, placement, layout);
  Schedule schedule = make_schedule("all_gather_domains", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const std::vector<Extent> outputs = extents_of_blocks(spec, placement, layout, pieces.chunks, output_block);
  const int64_t own_place = layout.own_slice(placement.node()).offset_bytes;
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  add_barrier({schedule, 1, pieces.chunks.count + 1});
  between.fetch(stage(1), outputs);
  copy_out(stage(2), outputs, in_domain, is_streaming);
  add_copy(stage(0), between.completed(own_place), with_stride(input(0), pieces.chunks.bytes), pieces.chunks);
  return schedule;
}

// Copy in, fetch a share of all blocks, copy all out.
Cost cost_all_gather_domains(const CollectiveSpec& spec) {
  const double chunks = cut_blocks_over_domains(spec).chunks.count;
  const double domain_size = smallest_domain_size(spec);
  const double bytes = spec.bytes;
  return {.barriers = chunks + 1,
          .memory_bytes = 2 * (spec.world_size * (1 + 1 / domain_size) + 1) * bytes,
          .far_bytes = far_ranks(spec) / domain_size * bytes};
}

}  // namespace zeropg

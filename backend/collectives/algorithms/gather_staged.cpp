// Gather: the ranks of the root's node stage their blocks, the root copies them out. One barrier per chunk. Ranks of
// other nodes send theirs straight to the root, which takes them in one after the other.
#include <algorithm>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_gather_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "gather_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Placement placement(spec);
  const auto is_near = [&](int32_t rank) { return placement.node_of(rank) == placement.node_of(spec.root); };
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank == spec.root || !is_near(spec.rank)) return;
    add_copy(stage, staging(spec.rank, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  };
  const auto collect = [&](PipelineStage stage, const Chunks& chunks) {
    const Region own = with_stride(input(0), chunks.bytes);
    const auto block_of = [&](int32_t rank) { return with_stride(output_block(spec, rank, 0), chunks.bytes); };
    if (!is_near(spec.rank)) add_send(stage, spec.root, own, chunks);
    if (spec.rank != spec.root) return;
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      if (!is_near(rank)) continue;
      add_copy(stage, block_of(rank), rank == spec.root ? own : staging(rank, 0, 0), chunks);
    }
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      if (!is_near(rank)) add_receive(stage, rank, block_of(rank), chunks);
    }
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, copy_in, collect);
}

Cost cost_gather_staged(const CollectiveSpec& spec) {
  const double far = is_one_node(spec) ? 0 : spec.world_size - size_of_root_node(spec);
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks,
          .memory_bytes = 2.0 * (spec.world_size - far) * spec.bytes,
          .network_hops = far > 0 ? 1.0 : 0,
          .network_bytes = far * spec.bytes,
          .messages = far * chunks};
}

}  // namespace zeropg

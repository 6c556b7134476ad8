// Scatter: the root stages a piece of the block of each rank of its node, these copy theirs out. One barrier per chunk.
// The blocks of other nodes' ranks go straight to them.
#include <algorithm>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

// The slot of the root holds a piece for each other rank of its node, whichever node that is.
int64_t piece_bytes(const CollectiveSpec& spec) {
  return cut_chunk(spec, std::max(1, largest_node_size(spec) - 1)).bytes;
}

}  // namespace

Schedule plan_scatter_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "scatter_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Placement placement(spec);
  const int64_t chunk_bytes = piece_bytes(spec);
  const auto is_near = [&](int32_t rank) { return placement.node_of(rank) == placement.node_of(spec.root); };
  const auto place_of = [&](int32_t rank) {
    const int32_t piece = piece_for_peer(placement.local_rank_of(spec.root), placement.local_rank_of(rank));
    return staging(spec.root, 0, piece * chunk_bytes);
  };
  const auto block_of = [&](int32_t rank) { return with_stride(input_block(spec, rank, 0), chunk_bytes); };
  const Region own = with_stride(output(0), chunk_bytes);
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank != spec.root) return;
    for (const int32_t rank : placement.local_ranks()) {
      if (rank == spec.root) continue;
      add_copy(stage, place_of(rank), block_of(rank), chunks);
    }
  };
  const auto hand_out = [&](PipelineStage stage, const Chunks& chunks) {
    if (!is_near(spec.rank)) return add_receive(stage, spec.root, own, chunks);
    if (spec.rank != spec.root) return add_copy(stage, own, place_of(spec.rank), chunks);
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      if (!is_near(rank)) add_send(stage, rank, block_of(rank), chunks);
    }
    add_copy(stage, own, block_of(spec.root), chunks);
  };
  return plan_staged_once(kName, spec, chunk_bytes, copy_in, hand_out);
}

Cost cost_scatter_staged(const CollectiveSpec& spec) {
  const double far = is_one_node(spec) ? 0 : spec.world_size - size_of_root_node(spec);
  const double chunks = std::max<double>(1, part_count(spec.bytes, piece_bytes(spec)));
  return {.barriers = chunks,
          .memory_bytes = 2.0 * (spec.world_size - far) * spec.bytes,
          .network_hops = far > 0 ? 1.0 : 0,
          .network_bytes = far * spec.bytes,
          .messages = far * chunks};
}

}  // namespace zeropg

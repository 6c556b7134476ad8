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
  const auto place = [&](int64_t chunk, int32_t rank) {
    const int32_t piece = piece_for_peer(placement.local_rank_of(spec.root), placement.local_rank_of(rank));
    return staging(spec.root, chunk, piece * chunk_bytes);
  };
  const auto stage = [&](Schedule& schedule, int64_t chunk, Range range) {
    if (spec.rank != spec.root) return;
    for (const int32_t rank : placement.local_ranks()) {
      if (rank == spec.root) continue;
      add_copy(schedule, place(chunk, rank), input_block(spec, rank, range.offset_bytes), range.bytes);
    }
  };
  const auto take = [&](Schedule& schedule, int64_t chunk, Range range) {
    const auto [offset, bytes] = range;
    if (!is_near(spec.rank)) return add_receive(schedule, spec.root, output(offset), bytes);
    if (spec.rank != spec.root) return add_copy(schedule, output(offset), place(chunk, spec.rank), bytes);
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      if (!is_near(rank)) add_send(schedule, rank, input_block(spec, rank, offset), bytes);
    }
    add_copy(schedule, output(offset), input_block(spec, spec.root, offset), bytes);
  };
  return plan_staged_once(kName, spec, chunk_bytes, stage, take);
}

Cost cost_scatter_staged(const CollectiveSpec& spec) {
  const double far = is_one_node(spec) ? 0 : spec.world_size - size_of_root_node(spec);
  const double chunks = std::max<double>(1, part_count(spec.bytes, piece_bytes(spec)));
  return {.barriers = chunks,
          .memory_bytes = 2.0 * (spec.world_size - far) * spec.bytes,
          .network_hops = far > 0 ? 1.0 : 0,
          .network_bytes = far * spec.bytes};
}

}  // namespace zeropg

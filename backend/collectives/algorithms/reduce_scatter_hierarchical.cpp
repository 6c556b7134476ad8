// Reduce-scatter over several nodes: each node reduces its share of the blocks of every other node and sends the sums
// to the blocks' owners, which add those of all nodes in node order. Each node sends every block of another node once.
//
// Note [Pipeline between nodes] in all_reduce_hierarchical.cpp, without its last two slots.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/internode_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 2;  // of a pair: the partial sums of two chunks

}  // namespace

bool supports_reduce_scatter_hierarchical(const CollectiveSpec& spec) {
  return !is_one_node(spec) && can_exchange(spec, spec.world_size, kMessagesUnderWay);
}

Schedule plan_reduce_scatter_hierarchical(const CollectiveSpec& spec) {
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  const Placement placement(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const InternodePhases between(spec, placement, layout);
  Schedule schedule = make_schedule("reduce_scatter_hierarchical", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  schedule.scratch_bytes = between.scratch_bytes();
  const auto is_chunk = [&](int64_t chunk) { return chunk >= 0 && chunk < pieces.chunks.count; };
  const auto inputs = [&](int64_t chunk) {
    const Range piece = part_of(spec.bytes, pieces.chunks.bytes, chunk);
    return extents_of_blocks(spec, placement, layout, piece, input_block);
  };
  stage_inputs(schedule, 0, inputs(0), layout, placement);
  for (int64_t slot = 0; slot <= pieces.chunks.count; ++slot) {
    if (is_chunk(slot)) {
      add_barrier(schedule);
      reduce_in_node(schedule, slot, inputs(slot), layout, placement,
                     [&](int32_t part, int64_t place) { return between.partial(slot, part, place); });
      between.send_partials(schedule, slot, inputs(slot));
    }
    if (is_chunk(slot + 1)) stage_inputs(schedule, slot + 1, inputs(slot + 1), layout, placement);
    if (is_chunk(slot - 1)) {
      const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
      between.complete(schedule, slot - 1, inputs(slot - 1),
                       [&](int64_t place) { return output((slot - 1) * pieces.chunks.bytes + place - first_place); });
    }
  }
  return schedule;
}

// Copy in what the others of the node reduce, reduce a share of all blocks in the node, add the nodes' sums.
Cost cost_reduce_scatter_hierarchical(const CollectiveSpec& spec) {
  const double total_bytes = static_cast<double>(spec.world_size) * spec.bytes;
  const double local = largest_node_size(spec);
  return {.barriers = std::max<double>(1, cut_blocks(spec, kMessagesUnderWay).chunks.count),
          .memory_bytes = (3 - 1 / local) * total_bytes + (node_count(spec) + 1.0) * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : 1.0,
          .network_bytes = static_cast<double>(blocks_over_busiest_link(spec)) * spec.bytes};
}

}  // namespace zeropg

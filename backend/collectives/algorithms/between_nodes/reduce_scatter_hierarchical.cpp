// Reduce-scatter over several nodes: each node reduces its share of the blocks of every other node and sends the sums
// to the blocks' owners, which add those of all nodes in node order. Each node sends every block of another node once.
//
// Note [Pipeline between nodes] in all_reduce_hierarchical.cpp, without its last two slots.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/link_bytes.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
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
  const SlotLayout slots(placement, layout, network_slot_bytes(spec));
  const NodeLayout in_node{placement, layout, slots};
  const InternodePhases between(spec, placement, layout);
  const int32_t groups = slots.group_count();
  Schedule schedule = make_schedule("reduce_scatter_hierarchical", pieces.chunks.count * groups);
  if (pieces.chunks.count == 0) return schedule;
  schedule.scratch_bytes = between.scratch_bytes();
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const std::vector<Extent> inputs = extents_of_blocks(spec, placement, layout, pieces.chunks, input_block);
  const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
  const auto partial = [&](int32_t part, int64_t place) { return between.partial(part, place); };
  for (int32_t group = 0; group < groups; ++group) {
    add_barrier(stage(1));
    reduce_in_node(stage(1), inputs, in_node, partial, ReduceScope::kOfRanks, group);
    between.send_partials(stage(1), slots.other_nodes(placement, group), inputs);
    const bool is_last = group + 1 == groups;
    stage_inputs(stage(is_last ? 0 : 1), inputs, in_node, is_last ? 0 : group + 1);
    if (group > 0) continue;
    between.complete(stage(2), inputs,
                     [&](int64_t place) { return with_stride(output(place - first_place), pieces.chunks.bytes); });
  }
  return schedule;
}

// Copy in what the others of the node reduce, reduce a share of all blocks in the node, add the nodes' sums.
Cost cost_reduce_scatter_hierarchical(const CollectiveSpec& spec) {
  const double total_bytes = static_cast<double>(spec.world_size) * spec.bytes;
  const double local = largest_node_size(spec);
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  const double chunks = pieces.chunks.count;
  const LinkBytes links = bytes_of_blocks(spec);
  return {.barriers = std::max<double>(1, chunks * group_count(spec, pieces)),
          .memory_bytes = (3 - 1 / local) * total_bytes + (node_count(spec) + 1.0) * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : 1.0,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 2.0 * (node_count(spec) - 1) * chunks};
}

}  // namespace zeropg

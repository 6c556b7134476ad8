// All-gather over several nodes: a rank sends its block to each other node once, divided among the ranks there, which
// stage what they receive for all of their node.
//
// Where the ranks of a node share one output, all_gather_per_node receives into it (node_gathers.h).
//
// With a codec all ranks get what the nodes that receive a block decode, also those of the node that it comes from.
//
// In slot t of the pipeline a rank sends its piece of chunk t, copies chunk t - 2 out, and stages its own piece and
// what it receives of chunk t - 1. See Note [Pipeline between nodes] in all_reduce_hierarchical.cpp.
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/link_bytes.h"
#include "backend/collectives/phases/node_gathers.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 2;  // of a pair: pieces of two chunks

void add_pipeline(Schedule& schedule, const CollectiveSpec& spec, const BlockPieces& pieces, bool has_staging) {
  const Placement placement(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const SlotLayout slots(placement, layout, network_slot_bytes(spec));
  const NodeLayout in_node{placement, layout, slots};
  const InternodePhases between(spec, placement, layout);
  const int32_t groups = slots.group_count();
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const std::vector<Extent> outputs =
      extents_of_blocks(spec, placement, layout, pieces.chunks, schedule.is_direct ? node_output_block : output_block);
  const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
  const bool is_encoded = spec.codec != nullptr;
  if (is_encoded) schedule.scratch_bytes = between.scratch_bytes();
  const Region own_input = with_stride(input(0), pieces.chunks.bytes);
  const auto own_piece = [&](int64_t place) {
    return is_encoded ? between.completed(place) : advance(own_input, place - first_place);
  };
  const auto arrival = [&](int32_t node, int64_t place) {
    return has_staging ? slots.staged(spec.rank, node, place) : tensor_at(outputs, place);
  };
  for (int32_t group = 0; group < groups; ++group) {
    if (!schedule.is_direct) add_barrier(stage(group == 0 ? 2 : 1));
    if (group == 0) {
      if (is_encoded) add_copy(stage(0), own_piece(first_place), own_input, pieces.chunks);
      between.send_completed(stage(0), placement.other_nodes(), outputs, own_piece);
    }
    if (has_staging) copy_out(stage(group == 0 ? 2 : 1), outputs, in_node, false, group == 0 ? groups - 1 : group - 1);
    const std::vector<int32_t> nodes = slots.other_nodes(placement, group);
    if (slots.group_of(placement.node()) == group) {
      add_copy(stage(1), arrival(placement.node(), first_place), own_piece(first_place), pieces.chunks);
    }
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      between.receive_completed(stage(1), *node, outputs, [&](int64_t place) { return arrival(*node, place); });
    }
  }
}

}  // namespace

bool supports_all_gather_hierarchical(const CollectiveSpec& spec) {
  return !is_one_node(spec) && can_exchange(spec, spec.world_size, kMessagesUnderWay);
}

Schedule plan_all_gather_hierarchical(const CollectiveSpec& spec) {
  return plan_gather("all_gather_hierarchical", spec, cut_blocks(spec, kMessagesUnderWay), add_pipeline);
}

Cost cost_all_gather_hierarchical(const CollectiveSpec& spec) {
  return cost_gather(spec, cut_blocks(spec, kMessagesUnderWay),
                     {.links = bytes_of_blocks(spec), .messages_of_chunk = 2.0 * (node_count(spec) - 1)});
}

bool supports_all_gather_per_node(const CollectiveSpec& spec) {
  return has_gather_per_node(spec) && supports_all_gather_hierarchical(spec);
}

Schedule plan_all_gather_per_node(const CollectiveSpec& spec) {
  return plan_gather_per_node("all_gather_per_node", spec, cut_blocks(spec, kMessagesUnderWay), add_pipeline);
}

Cost cost_all_gather_per_node(const CollectiveSpec& spec) {
  return cost_gather_per_node(spec, cost_all_gather_hierarchical(spec));
}

}  // namespace zeropg

// All-gather over several nodes: a rank sends its block to each other node once, divided among the ranks there, which
// stage what they receive for all of their node.
//
// Where the ranks of a node share one output, all_gather_per_node receives into it. Its messages are the same, so that
// each node may do the one or the other.
//
// With a codec all ranks get what the nodes that receive a block decode, also those of the node that it comes from.
//
// In slot t of the pipeline a rank sends its piece of chunk t, copies chunk t - 2 out, and stages its own piece and
// what it receives of chunk t - 1. See Note [Pipeline between nodes] in all_reduce_hierarchical.cpp.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/link_bytes.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 2;  // of a pair: pieces of two chunks

// What both algorithms have in common: so the messages of one node do not tell which of them it runs. `has_staging`:
// what comes in is staged for all ranks of the node; otherwise it is received where it goes to.
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
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  Schedule schedule = make_schedule("all_gather_hierarchical", pieces.chunks.count * group_count(spec, pieces));
  if (pieces.chunks.count == 0) return schedule;
  add_barrier(schedule);
  const Placement placement(spec);
  // Note [Alone on a node] in internode_phases.h
  add_pipeline(schedule, spec, pieces, /*has_staging=*/placement.node_size(placement.node()) > 1);
  return schedule;
}

Cost cost_all_gather_hierarchical(const CollectiveSpec& spec) {
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  const double chunks = pieces.chunks.count;
  const LinkBytes links = bytes_of_blocks(spec);
  return {.barriers = 1.0 + chunks * group_count(spec, pieces),
          // Alone, a rank copies its own block and receives the others' in place.
          .memory_bytes = (are_all_alone(spec) ? 2.0 : 2.0 * (spec.world_size + 1)) * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : 1.0,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 2.0 * (node_count(spec) - 1) * chunks};
}

bool supports_all_gather_per_node(const CollectiveSpec& spec) {
  return spec.has_node_output && !spec.output_is_list && supports_all_gather_hierarchical(spec);
}

Schedule plan_all_gather_per_node(const CollectiveSpec& spec) {
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  Schedule schedule = make_direct_schedule("all_gather_per_node");
  add_pipeline(schedule, spec, pieces, /*has_staging=*/false);
  begin_loop(schedule);
  add_barrier(schedule);  // what the other ranks of the node have received is there
  return schedule;
}

Cost cost_all_gather_per_node(const CollectiveSpec& spec) {
  Cost cost = cost_all_gather_hierarchical(spec);
  cost.barriers = 2;
  cost.memory_bytes = 2.0 * spec.bytes;  // the own block; all others are received in place
  return cost;
}

}  // namespace zeropg

// All-gather over racks: each block goes over the uplink of every other rack once, to a node that passes it on to the
// others of its rack.
//
// The links of nodes carry what they do when all nodes exchange directly. An uplink into a rack of k of m nodes carries
// the others' blocks, the lower bound, and not k times as much.
//
// In slot t of the pipeline a rank
//   sends its piece of chunk t to other racks,
//   receives what its node relays of chunk t - 1, and sends it and its own piece to the others of the rack,
//   copies chunk t - 3 out,
//   stages its own piece, what it relayed and what it receives from its rack of chunk t - 2.
// The ranks of a node that share one output receive into it (all_gather_racks_per_node), with the same messages, so
// that each node may do the one or the other: see all_gather_hierarchical.cpp.
#include <algorithm>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/node_gathers.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/phases/rack_relays.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

void add_pipeline(Schedule& schedule, const CollectiveSpec& spec, const BlockPieces& pieces, bool has_staging) {
  const Placement placement(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const SlotLayout slots(placement, layout, network_slot_bytes(spec));
  const NodeLayout in_node{placement, layout, slots};
  const InternodePhases between(spec, placement, layout);
  const int32_t node = placement.node();
  const RackRelays relays(spec, node);
  const std::vector<int32_t> relayed = relays.relayed_by(node);
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const std::vector<Extent> outputs =
      extents_of_blocks(spec, placement, layout, pieces.chunks, schedule.is_direct ? node_output_block : output_block);
  const int64_t first_place = layout.own_slice(node).offset_bytes;
  const Region own_input = with_stride(input(0), pieces.chunks.bytes);
  const auto own_piece = [&](int64_t place) { return advance(own_input, place - first_place); };
  const auto arrival = [&](int32_t part, int64_t place) {
    return has_staging ? slots.staged(spec.rank, part, place) : tensor_at(outputs, place);
  };
  // The slot still holds an older chunk when what is relayed comes in, so that waits in scratch, for two chunks.
  const int64_t slice_bytes = part_count(layout.largest_own_slice_bytes(), kCacheLineBytes) * kCacheLineBytes;
  const int64_t relayed_bytes = static_cast<int64_t>(relayed.size()) * slice_bytes;
  const auto relay = [&](int32_t part, int64_t place) {
    if (!has_staging) return arrival(part, place);
    const int64_t index = std::ranges::find(relayed, part) - relayed.begin();
    const int64_t in_slice = place - layout.own_slice(part).offset_bytes;
    return Region{
        .space = Space::kScratch, .offset_bytes = index * slice_bytes + in_slice, .stride_bytes = relayed_bytes};
  };
  if (has_staging) schedule.scratch_bytes = 2 * relayed_bytes;

  for (int32_t group = 0; group < slots.group_count(); ++group) {
    const bool is_first = group == 0;
    if (!schedule.is_direct) add_barrier(stage(is_first ? 3 : 2));
    if (is_first) {
      // Before a chunk is waited for, so that uplinks always have the next one.
      for (const int32_t rack : relays.other_racks()) {
        between.send_slice(stage(0), node, relays.relay_for(node, rack), outputs, own_piece);
      }
      for (size_t index = relayed.size(); index-- > 0;) {
        between.receive_slice(stage(1), relayed[index], relayed[index], outputs,
                              [&](int64_t place) { return relay(relayed[index], place); });
      }
      for (const int32_t near : relays.near_nodes()) {
        for (const int32_t part : relays.parts_as_seen_by(near)) {
          between.send_slice(stage(1), part, near, outputs,
                             [&](int64_t place) { return part == node ? own_piece(place) : relay(part, place); });
        }
      }
    }
    if (has_staging) {
      copy_out(stage(is_first ? 3 : 2), outputs, in_node, false, is_first ? slots.group_count() - 1 : group - 1);
    }
    if (slots.group_of(node) == group) {
      add_copy(stage(2), arrival(node, first_place), own_piece(first_place), pieces.chunks);
    }
    for (const int32_t part : slots.other_nodes(placement, group)) {
      if (const int32_t from = relays.near_end(part); from != node) {
        between.receive_slice(stage(2), part, from, outputs, [&](int64_t place) { return arrival(part, place); });
        continue;
      }
      for (const Extent& extent : cut(outputs, layout.own_slice(part))) {
        const int64_t place = extent.places.offset_bytes;
        if (has_staging) add_copy(stage(2), arrival(part, place), relay(part, place), extent.bytes());
      }
    }
  }
}

}  // namespace

bool supports_all_gather_racks(const CollectiveSpec& spec) { return can_relay_blocks(spec); }

Schedule plan_all_gather_racks(const CollectiveSpec& spec) {
  return plan_gather("all_gather_racks", spec, cut_relayed_blocks(spec), add_pipeline);
}

Cost cost_all_gather_racks(const CollectiveSpec& spec) {
  return cost_gather(spec, cut_relayed_blocks(spec),
                     {.links = bytes_of_relayed_blocks(spec),
                      .hops = 2,
                      .messages_of_chunk = messages_of_relayed_blocks(spec),
                      .relayed_blocks = most_relayed(spec)});
}

bool supports_all_gather_racks_per_node(const CollectiveSpec& spec) {
  return has_gather_per_node(spec) && supports_all_gather_racks(spec);
}

Schedule plan_all_gather_racks_per_node(const CollectiveSpec& spec) {
  return plan_gather_per_node("all_gather_racks_per_node", spec, cut_relayed_blocks(spec), add_pipeline);
}

Cost cost_all_gather_racks_per_node(const CollectiveSpec& spec) {
  return cost_gather_per_node(spec, cost_all_gather_racks(spec));
}

}  // namespace zeropg

// All-reduce over racks of nodes, one level inside the other: reduce-scatter in each node, then among the nodes of each
// rack, exchange between racks, all-gather among the nodes of each rack, then in each node.
//
// A rack's uplink carries 2 (r - 1) / r times the bytes for r racks, the lower bound, whatever the number of nodes; a
// node's link 2 (m - 1) / m times, as when all m nodes exchange directly. Of messages a node has one for each other
// node of its rack and one for each other rack, in each direction and phase.
//
// The pipeline is that of Note [Pipeline between nodes] in all_reduce_hierarchical.cpp with two phases more: in slot t
// a rank
//   reduces chunk t in its node and sends its partial sums to the nodes of its rack that keep them,
//   copies chunk t - 5 out and chunk t + 1 in, and stages what it keeps of chunk t - 4,
//   adds what nodes of its rack have of chunk t - 1, and sends it to the racks that complete it,
//   completes what racks have of chunk t - 2, and sends it,
//   receives what other racks completed of chunk t - 3, and sends what it keeps of it to the nodes of its rack,
//   receives what those keep of chunk t - 4 and stages it.
#include <algorithm>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/phases/rack_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/rack_layout.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 3;  // of a pair: those of one phase in two chunks, of another one in one
constexpr int32_t kReductionToCopyOut = 5;

int64_t largest_kept_bytes(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment, size_t least_nodes) {
  int64_t largest = 0;
  for (const std::vector<int32_t>& rack : spec.racks) {
    if (rack.size() < least_nodes) continue;
    largest = std::max(largest, equal_part_of(chunk_bytes, static_cast<int32_t>(rack.size()), alignment, 0).bytes);
  }
  return largest;
}

// At most, of all that a pair of ranks exchanges in one phase of a chunk: a slice of what a node keeps, within a rack;
// between racks one rack's part of that. Every cut may add the rounding of one length.
int64_t longest_message_bytes(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment) {
  const int64_t slices = second_smallest_node_size(spec);
  const auto racks = static_cast<int64_t>(spec.racks.size());
  const auto cuts = static_cast<int64_t>(rack_pieces(spec, chunk_bytes, alignment).size());
  const int64_t near = largest_kept_bytes(spec, chunk_bytes, alignment, 2) / slices + cuts * alignment;
  const int64_t far = largest_kept_bytes(spec, chunk_bytes, alignment, 1) / slices / racks +
                      cuts * racks * largest_node_size(spec) * alignment;
  return std::max(near, std::min(far, largest_kept_bytes(spec, chunk_bytes, alignment, 1)));
}

struct Sizes {
  int64_t alignment;
  Chunks chunks;
};

Sizes sizes_of(const CollectiveSpec& spec) {
  const int64_t alignment = exchange_alignment(spec, 1, kMessagesUnderWay);
  const int64_t room = largest_message_bytes(spec, kMessagesUnderWay, alignment);
  int64_t most = network_chunk_bytes(spec, spec.bytes, alignment);
  while (most > alignment && longest_message_bytes(spec, most, alignment) > room) {
    most = std::max(most / 2 / alignment, int64_t{1}) * alignment;
  }
  return {alignment, equal_chunks(spec.bytes, most, alignment)};
}

}  // namespace

bool supports_all_reduce_racks(const CollectiveSpec& spec) {
  if (spec.racks.size() < 2 || spec.codec != nullptr || !can_exchange(spec, 1, kMessagesUnderWay)) return false;
  const int64_t alignment = exchange_alignment(spec, 1, kMessagesUnderWay);
  return largest_message_bytes(spec, kMessagesUnderWay, alignment) >= longest_message_bytes(spec, alignment, alignment);
}

Schedule plan_all_reduce_racks(const CollectiveSpec& spec) {
  const Sizes sizes = sizes_of(spec);
  const Placement placement(spec);
  const RackLayout layout(spec, placement, sizes.chunks.bytes, sizes.alignment);
  Schedule schedule = make_schedule("all_reduce_racks", sizes.chunks.count);
  if (sizes.chunks.count == 0) return schedule;
  const SlotLayout slots(layout.chunk());
  const NodeLayout in_node{placement, layout.chunk(), slots};
  const std::vector<Extent> inputs = extents_of_range(input(0), sizes.chunks);
  const RackPhases between(placement, layout, inputs);
  schedule.scratch_bytes = between.scratch_bytes();
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, sizes.chunks.count); };
  const auto own_slot = [&](int32_t piece, int64_t place) { return slots.staged(spec.rank, piece, place); };

  add_barriers(stage(1), kReductionToCopyOut);
  reduce_in_node(stage(1), inputs, in_node,
                 [&](int32_t piece, int64_t place) { return between.partial(piece, place); });
  between.send_partials(stage(1));
  copy_out(stage(1 + kReductionToCopyOut), extents_of_range(output(0), sizes.chunks), in_node);
  stage_inputs(stage(0), inputs, in_node);
  between.stage_kept_results(stage(5), own_slot);
  between.sum_rack(stage(2));
  between.send_sums(stage(2));
  between.complete(stage(3));
  between.send_completed(stage(3));
  between.receive_completed(stage(4));
  between.send_results(stage(4));
  between.receive_results(stage(5), own_slot);
  return schedule;
}

// As in a node (all_reduce_staged.cpp), and with what a rank keeps: it is added over the nodes of the rack and copied
// into staging, and each rack's part of it is added over the racks.
Cost cost_all_reduce_racks(const CollectiveSpec& spec) {
  const Sizes sizes = sizes_of(spec);
  const auto bytes = static_cast<double>(spec.bytes);
  const double chunks = sizes.chunks.count;
  const auto racks = static_cast<double>(spec.racks.size());
  const double slice = bytes / largest_node_size(spec);
  const auto pieces = static_cast<double>(rack_pieces(spec, sizes.chunks.bytes, sizes.alignment).size());
  double memory = 0;
  LinkBytes links{.of_nodes = std::vector<double>(spec.nodes.size()),
                  .of_uplinks = std::vector<double>(spec.racks.size(), 2 * (racks - 1) / racks * bytes)};
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto nodes = static_cast<double>(rack.size());
    memory = std::max(memory, (nodes + 3) / nodes + (racks + 1) / racks / nodes);
    for (const int32_t node : rack) links.of_nodes[node] = 2 * (nodes - 1 + (racks - 1) / racks) / nodes * bytes;
  }
  return {.barriers = chunks == 0 ? 1 : chunks + std::min<double>(chunks, kReductionToCopyOut),
          .memory_bytes = 5 * bytes + (memory - 1) * slice,
          .network_hops = chunks == 0 ? 0 : 4.0,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 4 * (pieces - 1 + racks - 1) * chunks};
}

}  // namespace zeropg

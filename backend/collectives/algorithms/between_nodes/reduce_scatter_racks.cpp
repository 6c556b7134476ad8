// Reduce-scatter over racks: what a node of another rack gets is added within the rack first, by one of its nodes, so
// that uplinks carry every block once per rack and not once per node. The links of nodes carry what they do when all
// nodes exchange directly.
//
// In slot t of the pipeline a rank
//   reduces chunk t in its node and sends its partial sums to the nodes of its rack that get, or relay, them,
//   stages its inputs of chunk t + 1,
//   adds what its rack has of chunk t - 1, and sends to other racks what it relays,
//   adds what the racks have of its own part of chunk t - 2.
// Floats are added over the nodes of a rack in order, then over racks in order, as in all_reduce_racks.
#include <algorithm>
#include <ranges>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/phases/rack_relays.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

class Plan {
 public:
  explicit Plan(const CollectiveSpec& spec)
      : spec_(spec),
        pieces_(cut_relayed_blocks(spec)),
        placement_(spec),
        layout_(ChunkLayout::of_blocks(placement_, pieces_.chunks.bytes, pieces_.alignment)),
        between_(spec, placement_, layout_),
        relays_(spec, placement_.node()),
        parts_(relays_.relayed_by(placement_.node())),
        inputs_(extents_of_blocks(spec, placement_, layout_, pieces_.chunks, input_block)),
        slots_(placement_, layout_, network_slot_bytes(spec)),
        slice_bytes_(part_count(layout_.largest_own_slice_bytes(), kCacheLineBytes) * kCacheLineBytes),
        schedule_(make_schedule("reduce_scatter_racks", pieces_.chunks.count * slots_.group_count())) {
    parts_.insert(parts_.begin(), placement_.node());
  }

  Schedule run() && {
    if (pieces_.chunks.count == 0) return std::move(schedule_);
    const NodeLayout in_node{placement_, layout_, slots_};
    const auto partial = [&](int32_t part, int64_t place) { return between_.partial(part, place); };
    const auto sources = static_cast<int64_t>(relays_.nodes().size());
    const auto parts = static_cast<int64_t>(parts_.size());
    schedule_.scratch_bytes = between_.scratch_bytes() + ((2 + sources) * parts + relays_.rack_count()) * slice_bytes_;

    for (int32_t group = 0; group < slots_.group_count(); ++group) {
      const bool is_last = group + 1 == slots_.group_count();
      add_barrier(stage(1));
      reduce_in_node(stage(1), inputs_, in_node, partial, ReduceScope::kOfRanks, group);
      send_partials(group);
      stage_inputs(stage(is_last ? 0 : 1), inputs_, in_node, is_last ? 0 : group + 1);
    }
    sum_rack();
    send_sums();
    complete();
    return std::move(schedule_);
  }

 private:
  PipelineStage stage(int32_t lag) { return {schedule_, lag, pieces_.chunks.count}; }

  void send_partials(int32_t group) {
    for (const int32_t part : slots_.other_nodes(placement_, group)) {
      if (const int32_t to = relays_.near_end(part); to != placement_.node()) {
        between_.send_slice(stage(1), part, to, inputs_, [&](int64_t place) { return between_.partial(part, place); });
      }
    }
  }

  void sum_rack() {
    const std::vector<int32_t>& nodes = relays_.nodes();
    for (const int32_t near : std::views::reverse(relays_.near_nodes())) {
      const auto source = std::ranges::find(nodes, near) - nodes.begin();
      for (const int32_t part : relays_.parts_as_seen_by(near)) {
        const size_t index = std::ranges::find(parts_, part) - parts_.begin();
        between_.receive_slice(stage(2), part, near, inputs_,
                               [&](int64_t place) { return of_node(source, index, place); });
      }
    }
    std::vector<Region> sources(nodes.size());
    for (size_t index = 0; index < parts_.size(); ++index) {
      for (const Extent& extent : cut(inputs_, layout_.own_slice(parts_[index]))) {
        const int64_t place = extent.places.offset_bytes;
        for (size_t i = 0; i < nodes.size(); ++i) {
          sources[i] = nodes[i] == placement_.node() ? between_.partial(parts_[index], place)
                                                     : of_node(static_cast<int64_t>(i), index, place);
        }
        add_reduce(stage(2), sum(index, place), sources, extent.bytes(), ReduceScope::kOfSomeNodes);
      }
    }
  }

  void send_sums() {
    for (size_t index = 1; index < parts_.size(); ++index) {
      between_.send_slice(stage(2), parts_[index], parts_[index], inputs_,
                          [&](int64_t place) { return sum(index, place); });
    }
  }

  void complete() {
    const int32_t node = placement_.node();
    for (const int32_t rack : std::views::reverse(relays_.other_racks())) {
      between_.receive_slice(stage(3), node, relays_.relay_for(node, rack), inputs_,
                             [&](int64_t place) { return of_rack(rack, place); });
    }
    const Range own = layout_.own_slice(node);
    std::vector<Region> sources(relays_.rack_count());
    for (const Extent& extent : cut(inputs_, own)) {
      const int64_t place = extent.places.offset_bytes;
      for (int32_t rack = 0; rack < relays_.rack_count(); ++rack) {
        sources[rack] = rack == relays_.rack() ? sum(0, place) : of_rack(rack, place);
      }
      add_reduce(stage(3), with_stride(output(place - own.offset_bytes), pieces_.chunks.bytes), sources, extent.bytes(),
                 ReduceScope::kOfNodes);
    }
  }

  // Scratch behind the partial sums, in own slices of the own part and those that this node relays: their sums over the
  // rack for two chunks, and what comes in from each node of it; then what comes in from each rack.
  Region slice(int64_t number, size_t index, int64_t place) const {
    const int64_t in_slice = place - layout_.own_slice(parts_[index]).offset_bytes;
    return {.space = Space::kScratch, .offset_bytes = between_.scratch_bytes() + number * slice_bytes_ + in_slice};
  }
  Region sum(size_t index, int64_t place) const {
    const auto parts = static_cast<int64_t>(parts_.size());
    return with_stride(slice(static_cast<int64_t>(index), index, place), parts * slice_bytes_);
  }
  Region of_node(int64_t source, size_t index, int64_t place) const {
    const auto parts = static_cast<int64_t>(parts_.size());
    return slice((2 + source) * parts + static_cast<int64_t>(index), index, place);
  }
  Region of_rack(int32_t rack, int64_t place) const {
    const auto parts = static_cast<int64_t>(parts_.size());
    return slice((2 + static_cast<int64_t>(relays_.nodes().size())) * parts + rack, 0, place);
  }

  const CollectiveSpec& spec_;
  const BlockPieces pieces_;
  const Placement placement_;
  const ChunkLayout layout_;
  const InternodePhases between_;
  const RackRelays relays_;
  std::vector<int32_t> parts_;  // the own one, then those that this node relays
  const std::vector<Extent> inputs_;
  const SlotLayout slots_;
  const int64_t slice_bytes_;  // room for any slice of this rank
  Schedule schedule_;
};

}  // namespace

bool supports_reduce_scatter_racks(const CollectiveSpec& spec) { return can_relay_blocks(spec); }

Schedule plan_reduce_scatter_racks(const CollectiveSpec& spec) { return Plan(spec).run(); }

// As between nodes (reduce_scatter_hierarchical.cpp), with the sums over the rack, of what is relayed too, and over
// racks.
Cost cost_reduce_scatter_racks(const CollectiveSpec& spec) {
  const double total_bytes = static_cast<double>(spec.world_size) * spec.bytes;
  const double local = largest_node_size(spec);
  const BlockPieces pieces = cut_relayed_blocks(spec);
  const double chunks = pieces.chunks.count;
  const LinkBytes links = bytes_of_relayed_blocks(spec);
  const std::vector<RelayLoad> loads = relay_loads(spec);
  double added = 0;
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto sources = static_cast<double>(rack.size());
    for (const int32_t node : rack) added = std::max(added, (1.0 + loads[node].nodes) * (sources + 1));
  }
  added += static_cast<double>(spec.racks.size()) + 1;
  return {.barriers = std::max<double>(1, chunks * group_count(spec, pieces)),
          .memory_bytes = (3 - 1 / local) * total_bytes + added * static_cast<double>(spec.bytes),
          .network_hops = spec.bytes == 0 ? 0 : 2.0,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = messages_of_relayed_blocks(spec) * chunks};
}

}  // namespace zeropg

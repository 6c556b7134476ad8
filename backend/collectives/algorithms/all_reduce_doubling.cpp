// All-reduce over many nodes in few messages: reduce-scatter in each node, recursive doubling between nodes, all-gather
// in each node.
//
// In round i, nodes whose numbers differ in bit i exchange all that they have and add it: after log2 m rounds each of m
// nodes has the sum. Where m is no power of two, each node beyond the largest one in it gives its sums to a node below
// first and gets the result last. Both nodes of a pair add the lower one's sum first; so all get the same bits. Each
// round would round 16-bit floats once more; those are left to algorithms that do so once per node.
//
// A chunk is done before the next one begins. A receive waits for a send of the same round, so no ranks wait in a
// circle, and one message of a pair is under way at a time.
// Method: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005).
#include <algorithm>
#include <bit>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 1;

// Of m nodes: the largest power of two in it, and the rounds among these.
int32_t core_of(int32_t nodes) { return static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(nodes))); }
int32_t rounds_of(int32_t nodes) { return std::bit_width(static_cast<uint32_t>(nodes)) - 1; }

class Plan {
 public:
  explicit Plan(const CollectiveSpec& spec)
      : spec_(spec),
        sizes_(cut_whole(spec, kMessagesUnderWay)),
        placement_(spec),
        layout_(ChunkLayout::of_one_part(placement_, sizes_.chunks.bytes, sizes_.alignment)),
        slots_(layout_),
        in_node_{placement_, layout_, slots_},
        inputs_(extents_of_range(input(0), sizes_.chunks)),
        slice_bytes_(layout_.largest_own_slice_bytes()),
        core_(core_of(placement_.node_count())),
        schedule_(make_schedule("all_reduce_doubling", sizes_.chunks.count)) {}

  Schedule run() && {
    if (sizes_.chunks.count == 0) return std::move(schedule_);
    add_barriers(stage(1), 1);
    reduce_in_node(stage(1), inputs_, in_node_, [this](int32_t, int64_t place) { return sum(place); });
    copy_out(stage(2), extents_of_range(output(0), sizes_.chunks), in_node_);
    stage_inputs(stage(0), inputs_, in_node_);
    const int32_t node = placement_.node();
    const bool is_beyond = node >= core_;
    const bool has_beyond = node + core_ < placement_.node_count();
    if (is_beyond) send(node - core_, [this](int64_t place) { return sum(place); });
    if (has_beyond) add(node + core_, false);
    for (int32_t distance = 1; !is_beyond && distance < core_; distance *= 2) {
      send(node ^ distance, [this](int64_t place) { return sum(place); });
      add(node ^ distance, 2 * distance == core_);
    }
    if (has_beyond) send(node + core_, result());
    if (is_beyond) receive(node - core_, result());
    schedule_.scratch_bytes = (sums_ + 2) * slice_bytes_;
    return std::move(schedule_);
  }

 private:
  PipelineStage stage(int32_t lag) { return {schedule_, lag, sizes_.chunks.count}; }

  // Scratch for own slices: what comes in, then the sum of each round.
  Region slice(int64_t index, int64_t place) const {
    const int64_t in_slice = place - layout_.own_slice(0).offset_bytes;
    return {.space = Space::kScratch, .offset_bytes = index * slice_bytes_ + in_slice};
  }
  Region incoming(int64_t place) const { return slice(0, place); }
  Region sum(int64_t place) const { return slice(1 + sums_, place); }
  RegionOfPlace result() const {
    return [this](int64_t place) { return slots_.staged(spec_.rank, 0, place); };
  }

  void send(int32_t node, const RegionOfPlace& source) {
    for (const PeerPlaces& peer : layout_.peers_at(0, node, layout_.own_slice(0))) {
      for (const Extent& extent : cut(inputs_, peer.places)) {
        add_send(stage(1), peer.rank, source(extent.places.offset_bytes), extent.bytes());
      }
    }
  }

  void receive(int32_t node, const RegionOfPlace& destination) {
    for (const PeerPlaces& peer : layout_.peers_at(0, node, layout_.own_slice(0))) {
      for (const Extent& extent : cut(inputs_, peer.places)) {
        add_receive(stage(1), peer.rank, destination(extent.places.offset_bytes), extent.bytes());
      }
    }
  }

  // Receives the sum of a node and adds it to the own one.
  void add(int32_t node, bool is_last) {
    receive(node, [this](int64_t place) { return incoming(place); });
    for (const Extent& extent : cut(inputs_, layout_.own_slice(0))) {
      const int64_t place = extent.places.offset_bytes;
      const Region own = sum(place);
      const Region sources[] = {node < placement_.node() ? incoming(place) : own,
                                node < placement_.node() ? own : incoming(place)};
      add_reduce(stage(1), is_last ? result()(place) : slice(2 + sums_, place), sources, extent.bytes(),
                 is_last ? ReduceScope::kOfNodes : ReduceScope::kOfSomeNodes);
    }
    if (!is_last) ++sums_;
  }

  const CollectiveSpec& spec_;
  const WholeChunks sizes_;
  const Placement placement_;
  const ChunkLayout layout_;
  const SlotLayout slots_;
  const NodeLayout in_node_;
  const std::vector<Extent> inputs_;
  const int64_t slice_bytes_;
  const int32_t core_;
  int64_t sums_ = 0;  // that are done
  Schedule schedule_;
};

LinkBytes bytes_of_doubling(const CollectiveSpec& spec) {
  const int32_t nodes = node_count(spec);
  const int32_t core = core_of(nodes);
  const std::vector<int32_t> racks = spec.racks.empty() ? std::vector<int32_t>(nodes) : rack_of_nodes(spec);
  LinkBytes bytes{.of_nodes = std::vector<double>(nodes), .of_uplinks = std::vector<double>(spec.racks.size())};
  const auto add = [&](int32_t from, int32_t to) {
    bytes.of_nodes[from] += static_cast<double>(spec.bytes);
    if (racks[from] != racks[to]) bytes.of_uplinks[racks[from]] += static_cast<double>(spec.bytes);
  };
  for (int32_t node = 0; node < core; ++node) {
    for (int32_t distance = 1; distance < core; distance *= 2) add(node, node ^ distance);
  }
  for (int32_t node = core; node < nodes; ++node) {
    add(node, node - core);
    add(node - core, node);
  }
  return bytes;
}

}  // namespace

bool supports_all_reduce_doubling(const CollectiveSpec& spec) {
  const bool rounds_each_time = spec.accumulator_bytes > spec.element_bytes;
  return !is_one_node(spec) && spec.codec == nullptr && !rounds_each_time && can_exchange(spec, 1, kMessagesUnderWay);
}

Schedule plan_all_reduce_doubling(const CollectiveSpec& spec) { return Plan(spec).run(); }

// As in a node (all_reduce_staged.cpp), but that a rank's slice goes to staging by the last of its additions.
Cost cost_all_reduce_doubling(const CollectiveSpec& spec) {
  const double chunks = cut_whole(spec, kMessagesUnderWay).chunks.count;
  const int32_t nodes = node_count(spec);
  const bool has_beyond = core_of(nodes) < nodes;
  const double additions = rounds_of(nodes) + (has_beyond ? 1 : 0);
  const double slice = static_cast<double>(spec.bytes) / largest_node_size(spec);
  const LinkBytes links = bytes_of_doubling(spec);
  return {.barriers = chunks + 1,
          .memory_bytes = 5.0 * spec.bytes + (3 * additions - 1) * slice,
          .network_hops = (additions + (has_beyond ? 1 : 0)) * chunks,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 2 * additions * chunks,
          .is_in_line = true};
}

}  // namespace zeropg

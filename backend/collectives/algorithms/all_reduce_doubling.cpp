// All-reduce over many nodes in few messages: reduce-scatter in each node, an exchange between nodes in pairs,
// all-gather in each node.
//
// In round i, nodes whose numbers differ in bit i exchange and add what they have. `all_reduce_doubling` exchanges all
// of it: after log2 m rounds each of m nodes has the sum. `all_reduce_halving` exchanges half of what is left, so that
// each node ends with a part of m of the sum, and goes back the same way to collect the others: twice the messages, and
// 2 (m - 1) / m times the bytes on each node's link, the lower bound.
//
// Where m is no power of two, each node beyond the largest one in it gives its sums to a node below first and gets the
// result last. Both nodes of a pair add the lower one's sum first; so all ranks, and both variants, get the same bits.
// Each round would round 16-bit floats once more; those are left to algorithms that do so once per node.
//
// A chunk is done before the next one begins. A receive waits for a send of the same round, so no ranks wait in a
// circle. A node goes on from a pair's exchange once it has the other's part, so the other one may still have to take
// its last message while it sends the next one.
// Method: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005).
#include <algorithm>
#include <bit>
#include <functional>
#include <string_view>
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
constexpr int32_t kMessagesUnderWayHalving = 2;

int32_t messages_under_way(bool is_halving) { return is_halving ? kMessagesUnderWayHalving : kMessagesUnderWay; }

// Halving has so many rounds that a longer chunk gains more than what it could overlap with the copies of another.
WholeChunks sizes_of(const CollectiveSpec& spec, bool is_halving) {
  const int32_t under_way = messages_under_way(is_halving);
  if (!is_halving) return cut_whole(spec, under_way);
  const int64_t alignment = exchange_alignment(spec, 1, under_way);
  const int64_t most = std::min(network_slot_bytes(spec),
                                second_smallest_node_size(spec) * largest_message_bytes(spec, under_way, alignment));
  return {alignment, equal_chunks(spec.bytes, most / alignment * alignment, alignment)};
}

// Of m nodes: the largest power of two in it, and the rounds among these.
int32_t core_of(int32_t nodes) { return static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(nodes))); }
int32_t rounds_of(int32_t nodes) { return std::bit_width(static_cast<uint32_t>(nodes)) - 1; }

class Plan {
 public:
  Plan(const CollectiveSpec& spec, std::string_view name, bool is_halving)
      : spec_(spec),
        is_halving_(is_halving),
        sizes_(sizes_of(spec, is_halving)),
        placement_(spec),
        layout_(ChunkLayout::of_one_part(placement_, sizes_.chunks.bytes, sizes_.alignment)),
        slots_(layout_),
        in_node_{placement_, layout_, slots_},
        inputs_(extents_of_range(input(0), sizes_.chunks)),
        slice_bytes_(layout_.largest_own_slice_bytes()),
        core_(core_of(placement_.node_count())),
        schedule_(make_schedule(name, sizes_.chunks.count)) {}

  Schedule run() && {
    if (sizes_.chunks.count == 0) return std::move(schedule_);
    add_barriers(stage(1), 1);
    reduce_in_node(stage(1), inputs_, in_node_, [this](int32_t, int64_t place) { return sum(place); });
    copy_out(stage(2), extents_of_range(output(0), sizes_.chunks), in_node_);
    stage_inputs(stage(0), inputs_, in_node_);
    const int32_t node = placement_.node();
    const bool is_beyond = node >= core_;
    const bool has_beyond = node + core_ < placement_.node_count();
    const std::vector<Range> all = places_of({0, core_});
    if (is_beyond) send(node - core_, all, [this](int64_t place) { return sum(place); });
    if (has_beyond) add(node + core_, all, false);
    if (!is_beyond) is_halving_ ? halve() : exchange_all();
    if (has_beyond) send(node + core_, all, result());
    if (is_beyond) receive(node - core_, all, result());
    schedule_.scratch_bytes = (sums_ + 2) * slice_bytes_;
    return std::move(schedule_);
  }

 private:
  // Of the `core_` equal parts of a chunk. Each part has places in the slices of all ranks of a node, so that all work.
  struct Parts {
    int32_t first;
    int32_t count;
  };

  PipelineStage stage(int32_t lag) { return {schedule_, lag, sizes_.chunks.count}; }

  void exchange_all() {
    const std::vector<Range> all = places_of({0, core_});
    for (int32_t distance = 1; distance < core_; distance *= 2) {
      const int32_t pair = placement_.node() ^ distance;
      send(pair, all, [this](int64_t place) { return sum(place); });
      add(pair, all, 2 * distance == core_);
    }
  }

  void halve() {
    const int32_t node = placement_.node();
    // What the pairs of the rounds complete, and then give: the other half of what is left before the round.
    std::vector<Parts> given;
    Parts own{0, core_};
    for (int32_t distance = 1; distance < core_; distance *= 2) {
      const int32_t half = own.count / 2;
      const Parts lower{own.first, half};
      const Parts upper{own.first + half, half};
      const bool keeps_lower = (node & distance) == 0;
      given.push_back(keeps_lower ? upper : lower);
      own = keeps_lower ? lower : upper;
      send(node ^ distance, places_of(given.back()), [this](int64_t place) { return sum(place); });
      add(node ^ distance, places_of(own), 2 * distance == core_);
    }
    for (int32_t distance = core_ / 2; distance > 0; distance /= 2) {
      send(node ^ distance, places_of(own), result());
      receive(node ^ distance, places_of(given.back()), result());
      own = {std::min(own.first, given.back().first), 2 * own.count};
      given.pop_back();
    }
  }

  std::vector<Range> places_of(Parts parts) const {
    if (parts.count == core_) return {{0, sizes_.chunks.bytes}};
    std::vector<Range> places;
    const int32_t columns = largest_node_size(spec_);
    for (int32_t index = 0; index < columns; ++index) {
      const Range column = equal_part_of(sizes_.chunks.bytes, columns, sizes_.alignment, index);
      const auto part_at = [&](int32_t part) { return equal_part_of(column.bytes, core_, sizes_.alignment, part); };
      const Range last = part_at(parts.first + parts.count - 1);
      const int64_t first = part_at(parts.first).offset_bytes;
      places.push_back({column.offset_bytes + first, last.offset_bytes + last.bytes - first});
    }
    return places;
  }

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
  // Of these places, those that this rank handles and one rank of another node does, with the bytes that are there.
  using Handle = std::function<void(int32_t peer, const Extent& extent)>;
  void for_each_message(int32_t node, const std::vector<Range>& places, const Handle& handle) const {
    for (const Range& range : places) {
      for (const PeerPlaces& peer : layout_.peers_at(0, node, overlap(layout_.own_slice(0), range))) {
        for (const Extent& extent : cut(inputs_, peer.places)) handle(peer.rank, extent);
      }
    }
  }

  void send(int32_t node, const std::vector<Range>& places, const RegionOfPlace& source) {
    for_each_message(node, places, [&](int32_t peer, const Extent& extent) {
      add_send(stage(1), peer, source(extent.places.offset_bytes), extent.bytes());
    });
  }

  void receive(int32_t node, const std::vector<Range>& places, const RegionOfPlace& destination) {
    for_each_message(node, places, [&](int32_t peer, const Extent& extent) {
      add_receive(stage(1), peer, destination(extent.places.offset_bytes), extent.bytes());
    });
  }

  // Receives what a node has of these places and adds it to the own sum.
  void add(int32_t node, const std::vector<Range>& places, bool is_last) {
    receive(node, places, [this](int64_t place) { return incoming(place); });
    for (const Range& range : places) {
      for (const Extent& extent : cut(inputs_, overlap(layout_.own_slice(0), range))) {
        const int64_t place = extent.places.offset_bytes;
        const Region own_sum = sum(place);
        const Region sources[] = {node < placement_.node() ? incoming(place) : own_sum,
                                  node < placement_.node() ? own_sum : incoming(place)};
        add_reduce(stage(1), is_last ? result()(place) : slice(2 + sums_, place), sources, extent.bytes(),
                   is_last ? ReduceScope::kOfNodes : ReduceScope::kOfSomeNodes);
      }
    }
    if (!is_last) ++sums_;
  }

  const CollectiveSpec& spec_;
  const bool is_halving_;
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

// The share of a tensor that a node sends to its pair at `distance`, there and back.
double share_sent(int32_t distance, bool is_halving) { return is_halving ? 1.0 / distance : 1.0; }

LinkBytes bytes_of_pairs(const CollectiveSpec& spec, bool is_halving) {
  const int32_t nodes = node_count(spec);
  const int32_t core = core_of(nodes);
  const std::vector<int32_t> racks = spec.racks.empty() ? std::vector<int32_t>(nodes) : rack_of_nodes(spec);
  LinkBytes bytes{.of_nodes = std::vector<double>(nodes), .of_uplinks = std::vector<double>(spec.racks.size())};
  const auto add = [&](int32_t from, int32_t to, double share) {
    bytes.of_nodes[from] += share * static_cast<double>(spec.bytes);
    if (racks[from] != racks[to]) bytes.of_uplinks[racks[from]] += share * static_cast<double>(spec.bytes);
  };
  for (int32_t node = 0; node < core; ++node) {
    for (int32_t distance = 1; distance < core; distance *= 2) {
      add(node, node ^ distance, share_sent(distance, is_halving));
    }
  }
  for (int32_t node = core; node < nodes; ++node) {
    add(node, node - core, 1);
    add(node - core, node, 1);
  }
  return bytes;
}

// As in a node (all_reduce_staged.cpp), but that a rank's slice goes to staging by the last of its additions.
Cost cost(const CollectiveSpec& spec, bool is_halving) {
  const double chunks = sizes_of(spec, is_halving).chunks.count;
  const int32_t nodes = node_count(spec);
  const int32_t core = core_of(nodes);
  const double beyond = core < nodes ? 1 : 0;
  const double rounds = rounds_of(nodes);
  const double added = (is_halving ? 1 - 1.0 / core : rounds) + beyond;  // times the slice
  const double slice = static_cast<double>(spec.bytes) / largest_node_size(spec);
  const double exchanges = (is_halving ? 2 : 1) * rounds;
  const LinkBytes links = bytes_of_pairs(spec, is_halving);
  return {.barriers = chunks + 1,
          .memory_bytes = 5.0 * spec.bytes + (3 * added - 1) * slice,
          .network_hops = (exchanges + 2 * beyond) * chunks,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 2 * (exchanges + beyond) * chunks,
          .is_in_line = true};
}

bool supports(const CollectiveSpec& spec, bool is_halving) {
  const bool rounds_each_time = spec.accumulator_bytes > spec.element_bytes;
  return !is_one_node(spec) && spec.codec == nullptr && !rounds_each_time &&
         can_exchange(spec, 1, messages_under_way(is_halving));
}

}  // namespace

bool supports_all_reduce_doubling(const CollectiveSpec& spec) { return supports(spec, false); }
Schedule plan_all_reduce_doubling(const CollectiveSpec& spec) { return Plan(spec, "all_reduce_doubling", false).run(); }
Cost cost_all_reduce_doubling(const CollectiveSpec& spec) { return cost(spec, false); }

bool supports_all_reduce_halving(const CollectiveSpec& spec) { return supports(spec, true); }
Schedule plan_all_reduce_halving(const CollectiveSpec& spec) { return Plan(spec, "all_reduce_halving", true).run(); }
Cost cost_all_reduce_halving(const CollectiveSpec& spec) { return cost(spec, true); }

}  // namespace zeropg

// All-reduce over many nodes in few messages: reduce-scatter in each node, exchanges between a few nodes at a time,
// all-gather in each node.
//
// The nodes are a torus of as many dimensions as their number has prime factors: 12 nodes are one of 3 x 2 x 2, and
// eight a cube. In round i, the nodes that differ in coordinate i alone exchange and add what they have.
// `all_reduce_doubling` exchanges all of it: after log2 m rounds each of m = 2^k nodes has the sum.
// `all_reduce_halving` exchanges what is left in equal parts, one for each node of the row, so that each node ends with
// a part of m of the sum, and goes back the same way to collect the others: twice the messages, and 2 (m - 1) / m times
// the bytes on each node's link, the lower bound.
//
// Where m has a prime factor above 5, whose rows would cost more messages than they save, each node beyond the largest
// power of two in m gives its sums to a node below first and gets the result last. All nodes of a row add its sums in
// the order of the nodes; so all ranks, and both variants, get the same bits. Each round would round 16-bit floats once
// more; those are left to algorithms that do so once per node.
//
// A chunk is done before the next one begins. A receive waits for a send of the same round, so no ranks wait in a
// circle. A node goes on from a row's exchange once it has the others' parts, so each of them may still have to take
// its last message while it sends the next one.
// Method: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005), in mixed
// radix; Mikami et al.: Massively Distributed SGD, 2D-Torus All-reduce (2018).
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

// The nodes that take part in the rounds are the first `nodes`; with them, in one row of each dimension, are the nodes
// whose numbers differ by multiples of `distance` within `distance` x `length`.
struct Dimension {
  int32_t distance;
  int32_t length;
};
struct Torus {
  int32_t nodes = 1;
  std::vector<Dimension> dimensions;  // the longest first: what is left shrinks most where nodes are neighbours

  explicit Torus(int32_t all_nodes) {
    std::vector<int32_t> lengths;
    int32_t left = all_nodes;
    for (const int32_t factor : {5, 3, 2}) {
      for (; left % factor == 0; left /= factor) lengths.push_back(factor);
    }
    if (left > 1) lengths.assign(std::bit_width(static_cast<uint32_t>(all_nodes)) - 1, 2);
    for (const int32_t length : lengths) {
      dimensions.push_back({nodes, length});
      nodes *= length;
    }
  }
  int32_t longest_row() const { return dimensions.front().length; }
};

int32_t place_in_row(int32_t node, Dimension dimension) { return node / dimension.distance % dimension.length; }
int32_t node_in_row(int32_t node, Dimension dimension, int32_t place) {
  return node + (place - place_in_row(node, dimension)) * dimension.distance;
}

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
        torus_(placement_.node_count()),
        sum_(torus_.longest_row() - 1),
        schedule_(make_schedule(name, sizes_.chunks.count)) {}

  Schedule run() && {
    if (sizes_.chunks.count == 0) return std::move(schedule_);
    add_barriers(stage(1), 1);
    reduce_in_node(stage(1), inputs_, in_node_, [this](int32_t, int64_t place) { return sum(place); });
    copy_out(stage(2), extents_of_range(output(0), sizes_.chunks), in_node_);
    stage_inputs(stage(0), inputs_, in_node_);
    const int32_t node = placement_.node();
    const int32_t core = torus_.nodes;
    const bool is_beyond = node >= core;
    const bool has_beyond = node + core < placement_.node_count();
    const std::vector<Range> all = places_of({0, core});
    if (is_beyond) send(node - core, all, [this](int64_t place) { return sum(place); });
    if (has_beyond) add({node, node + core}, all, false);
    if (!is_beyond) is_halving_ ? halve() : exchange_all();
    if (has_beyond) send(node + core, all, result());
    if (is_beyond) receive(node - core, all, result());
    schedule_.scratch_bytes = (sum_ + 1) * slice_bytes_;
    return std::move(schedule_);
  }

 private:
  // Of a chunk's equal parts, one for each node of the torus. Each part has places in the slices of all ranks of a
  // node, so that all work.
  struct Parts {
    int32_t first;
    int32_t count;
  };

  PipelineStage stage(int32_t lag) { return {schedule_, lag, sizes_.chunks.count}; }

  std::vector<int32_t> row_of(Dimension dimension) const {
    std::vector<int32_t> row;
    for (int32_t place = 0; place < dimension.length; ++place) {
      row.push_back(node_in_row(placement_.node(), dimension, place));
    }
    return row;
  }
  bool is_last(Dimension dimension) const { return dimension.distance * dimension.length == torus_.nodes; }

  void exchange_all() {
    const std::vector<Range> all = places_of({0, torus_.nodes});
    for (const Dimension dimension : torus_.dimensions) {
      const std::vector<int32_t> row = row_of(dimension);
      for (const int32_t other : row) {
        if (other != placement_.node()) send(other, all, [this](int64_t place) { return sum(place); });
      }
      add(row, all, is_last(dimension));
    }
  }

  void halve() {
    const int32_t node = placement_.node();
    const auto part_of = [](Parts whole, Dimension dimension, int32_t place) {
      const int32_t count = whole.count / dimension.length;
      return Parts{whole.first + place * count, count};
    };
    std::vector<Parts> left{{0, torus_.nodes}};  // before each round, and after the last one
    for (const Dimension dimension : torus_.dimensions) {
      const Parts whole = left.back();
      const std::vector<int32_t> row = row_of(dimension);
      for (int32_t place = 0; place < dimension.length; ++place) {
        if (row[place] == node) continue;
        send(row[place], places_of(part_of(whole, dimension, place)), [this](int64_t where) { return sum(where); });
      }
      left.push_back(part_of(whole, dimension, place_in_row(node, dimension)));
      add(row, places_of(left.back()), is_last(dimension));
    }
    for (size_t round = torus_.dimensions.size(); round-- > 0;) {
      const Dimension dimension = torus_.dimensions[round];
      const std::vector<int32_t> row = row_of(dimension);
      for (const int32_t other : row) {
        if (other != node) send(other, places_of(left[round + 1]), result());
      }
      for (int32_t place = 0; place < dimension.length; ++place) {
        if (row[place] != node) receive(row[place], places_of(part_of(left[round], dimension, place)), result());
      }
    }
  }

  std::vector<Range> places_of(Parts parts) const {
    if (parts.count == torus_.nodes) return {{0, sizes_.chunks.bytes}};
    std::vector<Range> places;
    const int32_t columns = largest_node_size(spec_);
    for (int32_t index = 0; index < columns; ++index) {
      const Range column = equal_part_of(sizes_.chunks.bytes, columns, sizes_.alignment, index);
      const auto part_at = [&](int32_t part) {
        return equal_part_of(column.bytes, torus_.nodes, sizes_.alignment, part);
      };
      const Range last = part_at(parts.first + parts.count - 1);
      const int64_t first = part_at(parts.first).offset_bytes;
      places.push_back({column.offset_bytes + first, last.offset_bytes + last.bytes - first});
    }
    return places;
  }

  // Scratch for own slices: what comes in from each other node of a row, then the sum of each round.
  Region slice(int64_t index, int64_t place) const {
    const int64_t in_slice = place - layout_.own_slice(0).offset_bytes;
    return {.space = Space::kScratch, .offset_bytes = index * slice_bytes_ + in_slice};
  }
  Region sum(int64_t place) const { return slice(sum_, place); }
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

  // Receives what these nodes have of these places and adds it to the own sum, all in the order of `nodes`, of which
  // this one is one.
  void add(const std::vector<int32_t>& nodes, const std::vector<Range>& places, bool is_last) {
    std::vector<int64_t> slices;
    for (int64_t incoming = 0; const int32_t node : nodes) {
      slices.push_back(node == placement_.node() ? sum_ : incoming++);
      if (node == placement_.node()) continue;
      receive(node, places, [&](int64_t place) { return slice(slices.back(), place); });
    }
    if (!is_last) ++sum_;
    for (const Range& range : places) {
      for (const Extent& extent : cut(inputs_, overlap(layout_.own_slice(0), range))) {
        const int64_t place = extent.places.offset_bytes;
        std::vector<Region> sources;
        for (const int64_t index : slices) sources.push_back(slice(index, place));
        add_reduce(stage(1), is_last ? result()(place) : sum(place), sources, extent.bytes(),
                   is_last ? ReduceScope::kOfNodes : ReduceScope::kOfSomeNodes);
      }
    }
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
  const Torus torus_;
  int64_t sum_;  // the slice of the newest one
  Schedule schedule_;
};

// The share of a tensor that a node sends to each other one of its row, there and back.
double share_sent(Dimension dimension, bool is_halving) {
  return is_halving ? 2.0 / dimension.distance / dimension.length : 1.0;
}

LinkBytes bytes_of_rows(const CollectiveSpec& spec, const Torus& torus, bool is_halving) {
  const int32_t nodes = node_count(spec);
  const std::vector<int32_t> racks = spec.racks.empty() ? std::vector<int32_t>(nodes) : rack_of_nodes(spec);
  LinkBytes bytes{.of_nodes = std::vector<double>(nodes), .of_uplinks = std::vector<double>(spec.racks.size())};
  const auto add = [&](int32_t from, int32_t to, double share) {
    bytes.of_nodes[from] += share * static_cast<double>(spec.bytes);
    if (racks[from] != racks[to]) bytes.of_uplinks[racks[from]] += share * static_cast<double>(spec.bytes);
  };
  for (int32_t node = 0; node < torus.nodes; ++node) {
    for (const Dimension dimension : torus.dimensions) {
      for (int32_t place = 0; place < dimension.length; ++place) {
        const int32_t other = node_in_row(node, dimension, place);
        if (other != node) add(node, other, share_sent(dimension, is_halving));
      }
    }
  }
  for (int32_t node = torus.nodes; node < nodes; ++node) {
    add(node, node - torus.nodes, 1);
    add(node - torus.nodes, node, 1);
  }
  return bytes;
}

// As in a node (all_reduce_staged.cpp), but that a rank's slice goes to staging by the last of its additions.
Cost cost(const CollectiveSpec& spec, bool is_halving) {
  const double chunks = sizes_of(spec, is_halving).chunks.count;
  const Torus torus(node_count(spec));
  const double beyond = torus.nodes < node_count(spec) ? 1 : 0;
  const double slice = static_cast<double>(spec.bytes) / largest_node_size(spec);
  double moved = 3 * beyond * slice;  // by additions, each of which reads all of its row and writes a sum
  double others = 0;                  // in all rows of a node
  for (const Dimension dimension : torus.dimensions) {
    moved += (dimension.length + 1) * slice / (is_halving ? dimension.distance * dimension.length : 1);
    others += dimension.length - 1;
  }
  const double ways = is_halving ? 2 : 1;
  const LinkBytes links = bytes_of_rows(spec, torus, is_halving);
  return {.barriers = chunks + 1,
          .memory_bytes = 5.0 * spec.bytes + moved - slice,
          .network_hops = (ways * static_cast<double>(torus.dimensions.size()) + 2 * beyond) * chunks,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = 2 * (ways * others + beyond) * chunks,
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

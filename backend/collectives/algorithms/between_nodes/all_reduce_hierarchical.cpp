// All-reduce over several nodes: reduce-scatter in each node, exchange between nodes, all-gather in each node.
//
// Two variants, equal but for the exchange. `all_reduce_hierarchical` completes each part on one node and sends it
// back: 2 (m - 1) / m times the bytes cross each node's link, the lower bound. `all_reduce_hierarchical_one_shot` sends
// all partial sums to all nodes, each of which completes everything: one message deep, (m - 1) times the bytes.
//
// Note [Pipeline between nodes]
// Several chunks are under way. In slot t, that is between two barriers (as many slots for each chunk as it has groups
// of parts: slot_layout.h), a rank
//   reduces chunk t in its node and sends its partial sums,
//   copies chunk t - 3 out and chunk t + 1 in,
//   receives the other nodes' partial sums of chunk t - 1, completes its slice and sends it,
//   receives what others completed of chunk t - 2 and stages it.
// So what is sent in one slot is received in the next, while memory works. On banks: chunks t, t - 2 and t + 1, t - 3
// share one, in each pair one uses the own slices and the other one the rest. No rank waits in a circle: a receive
// waits for a send of an earlier slot, a send only for room, and all messages of a pair that can be under way when it
// is reached fit the window together.
#include <algorithm>
#include <array>
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

constexpr int32_t kMessagesUnderWay = 3;         // of a pair: the partial sums of two chunks and a completed slice
constexpr int32_t kMessagesUnderWayOneShot = 2;  // the partial sums of two chunks

struct Sizes {
  int64_t alignment;
  Chunks chunks;
  int32_t groups;  // of parts, in a chunk: slot_layout.h
};

Sizes sizes_of(const CollectiveSpec& spec, bool is_one_shot) {
  const int32_t under_way = is_one_shot ? kMessagesUnderWayOneShot : kMessagesUnderWay;
  const int64_t alignment = exchange_alignment(spec, 1, under_way);
  // A message is at most a slice of the larger node of a pair.
  const int64_t part = second_smallest_node_size(spec) * largest_message_bytes(spec, under_way, alignment);
  const bool has_one_group = is_one_shot || !spec.node_shares.empty();
  const int64_t wanted = has_one_group ? network_chunk_bytes(spec, spec.bytes, alignment)
                                       : parted_chunk_bytes(spec, spec.bytes, alignment);
  const int64_t most = std::min(wanted, is_one_shot ? part : longest_chunk_bytes(spec, part, alignment));
  const int64_t slot_bytes = network_slot_bytes(spec);
  const Chunks chunks = equal_chunks(spec.bytes, most, alignment);
  if (chunks.bytes <= slot_bytes || has_one_group) return {alignment, chunks, 1};
  const int32_t nodes = node_count(spec);
  const int64_t parts = alignment * nodes;
  // A codec's blocks may be so large that a chunk has none for some nodes.
  if (most < parts)
    return {alignment, equal_chunks(spec.bytes, std::min(most, slot_bytes / alignment * alignment), alignment), 1};
  const Chunks in_parts = equal_chunks(spec.bytes, most / parts * parts, parts);
  if (in_parts.bytes <= slot_bytes) return {alignment, in_parts, 1};
  return {alignment, in_parts, group_count(nodes, in_parts.bytes / nodes, slot_bytes)};
}

CollectiveSpec with_usable_shares(CollectiveSpec spec) {
  check_shares(spec);
  if (!can_use_shares(spec)) spec.node_shares.clear();
  return spec;
}

class Plan {
 public:
  // `is_reduce`: only the root wants the result, so only its node gets the completed parts.
  Plan(const CollectiveSpec& spec, std::string_view name, bool is_one_shot, bool is_reduce = false)
      : spec_(spec),
        is_one_shot_(is_one_shot),
        is_reduce_(is_reduce),
        sizes_(sizes_of(spec, is_one_shot)),
        placement_(spec),
        layout_(is_one_shot
                    ? ChunkLayout::of_one_part(placement_, sizes_.chunks.bytes, sizes_.alignment)
                    : ChunkLayout::of_parts(placement_, parts_by_shares(spec, sizes_.chunks.bytes, sizes_.alignment),
                                            sizes_.alignment)),
        slots_(placement_, layout_, network_slot_bytes(spec)),
        in_node_{placement_, layout_, slots_},
        is_alone_(placement_.node_size(placement_.node()) == 1 && spec.codec == nullptr && !is_reduce),
        inputs_(extents_of_range(input(0), sizes_.chunks)),
        outputs_(extents_of_range(output(0), sizes_.chunks)),
        between_(spec, placement_, layout_, is_alone_ ? outputs_ : std::vector<Extent>()),
        schedule_(make_schedule(name, sizes_.chunks.count * sizes_.groups)) {}

  Schedule run() && {
    if (sizes_.chunks.count == 0) return std::move(schedule_);
    schedule_.scratch_bytes = between_.scratch_bytes();
    reserve();
    for (int32_t group = 0; group < slots_.group_count(); ++group) {
      const bool is_first = group == 0;
      const bool is_last = group + 1 == slots_.group_count();
      const int32_t lag = is_one_shot_ ? 2 : is_first ? 3 : 2;  // from a reduction to the copying out of what is staged
      add_barriers(stage(1), lag);
      reduce_in_node(stage(1), inputs_, in_node_, partials(), ReduceScope::kOfRanks, group);
      between_.send_partials(stage(1), slots_.other_nodes(placement_, group), inputs_);
      if (!is_alone_ && (!is_reduce_ || spec_.rank == spec_.root)) {
        copy_out(stage(1 + lag), outputs_, in_node_, false, is_first ? slots_.group_count() - 1 : group - 1);
      }
      stage_inputs(stage(is_last ? 0 : 1), inputs_, in_node_, is_last ? 0 : group + 1);
      if (is_first) complete();
      if (is_one_shot_) continue;
      if (is_last) send_completed();
      if (!is_reduce_ || placement_.node() == placement_.node_of(spec_.root)) stage_results(group);
    }
    return std::move(schedule_);
  }

 private:
  // In large groups the steps are megabytes, which are not to be moved while they grow.
  void reserve() {
    const auto nodes = static_cast<size_t>(placement_.node_count());
    const size_t ranks = placement_.local_ranks().size();
    constexpr size_t kOthersOfAPart = 8;  // two copies, a reduction, four messages; barriers
    schedule_.steps.reserve(nodes * (ranks + kOthersOfAPart));
    schedule_.sources.reserve(nodes * (ranks + 1));
  }

  PipelineStage stage(int32_t lag) { return {schedule_, lag, sizes_.chunks.count}; }
  PartialOfPlace partials() const {
    return [this](int32_t part, int64_t place) { return between_.partial(part, place); };
  }

  // In one shot where others copy it from, otherwise into scratch: the own slot's place is still read by the ranks that
  // copy an earlier chunk out.
  void complete() {
    if (is_one_shot_ && !is_alone_) {
      return between_.complete(stage(2), inputs_, [&](int64_t place) { return slots_.staged(spec_.rank, 0, place); });
    }
    between_.complete(stage(2), inputs_, [&](int64_t place) { return between_.completed(place); });
  }

  // Behind the partial sums of all groups, as they are received: what was completed last of an earlier chunk.
  void send_completed() {
    const std::vector<int32_t> root_node{placement_.node_of(spec_.root)};
    between_.send_completed(stage(2), is_reduce_ ? root_node : placement_.other_nodes(), inputs_,
                            [&](int64_t place) { return between_.completed(place); });
  }

  void stage_results(int32_t group) {
    const int32_t own_part = placement_.node();
    if (!is_alone_ && slots_.group_of(own_part) == group) {
      for (const Extent& extent : cut(inputs_, layout_.own_slice(own_part))) {
        const int64_t place = extent.places.offset_bytes;
        add_copy(stage(3), slots_.staged(spec_.rank, own_part, place), between_.completed(place), extent.bytes());
      }
    }
    const std::vector<int32_t> nodes = slots_.other_nodes(placement_, group);
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      between_.receive_completed(stage(3), *node, inputs_, [&](int64_t place) {
        return is_alone_ ? tensor_at(outputs_, place) : slots_.staged(spec_.rank, *node, place);
      });
    }
  }

  const CollectiveSpec& spec_;
  const bool is_one_shot_;
  const bool is_reduce_;
  const Sizes sizes_;
  const Placement placement_;
  const ChunkLayout layout_;
  const SlotLayout slots_;
  const NodeLayout in_node_;
  const bool is_alone_;  // Note [Alone on a node] in internode_phases.h
  const std::vector<Extent> inputs_;
  const std::vector<Extent> outputs_;
  const InternodePhases between_;
  Schedule schedule_;
};

// Through staging as within a node; then a rank's slice, 1 / n of the tensor, is added over m nodes: all of it in one
// shot, otherwise one part of m, which is staged as well. Ranks that are alone on their nodes stage nothing.
Cost cost(const CollectiveSpec& spec, bool is_one_shot, bool is_reduce = false) {
  const Sizes sizes = sizes_of(spec, is_one_shot);
  const double nodes = node_count(spec);
  const double chunks = sizes.chunks.count;
  const double overlap = is_one_shot ? 2 : 3;
  const double slice = static_cast<double>(spec.bytes) / largest_node_size(spec);
  const std::vector<double> shares = shares_of_nodes(spec);
  const double largest_share = *std::max_element(shares.begin(), shares.end());
  const LinkBytes links = is_one_shot ? bytes_to_all_nodes(spec) : bytes_of_exchange(spec, shares);
  const double share = is_one_shot ? 1 : largest_share;
  const double staged = 5.0 * spec.bytes + (is_one_shot ? nodes : (nodes + 3) * share - 1) * slice;
  const double alone = 2.0 * spec.bytes + (nodes + 1) * share * slice;
  const double more_groups = (sizes.groups - 1) * (chunks + std::min(chunks, 2.0));
  return {.barriers = chunks == 0 ? 1 : chunks + std::min(chunks, overlap) + more_groups,
          .memory_bytes = are_all_alone(spec) && !is_reduce ? alone : staged,
          .network_hops = chunks == 0   ? 0
                          : is_one_shot ? 1.0
                                        : 2.0,
          .network_bytes = *std::max_element(links.of_nodes.begin(), links.of_nodes.end()),
          .links = links,
          .messages = (is_one_shot ? 2 : 4) * (nodes - 1) * chunks};
}

}  // namespace

bool supports_all_reduce_hierarchical(const CollectiveSpec& spec) {
  return !is_one_node(spec) && can_exchange(spec, 1, kMessagesUnderWay);
}

// Not with a codec: every node would add its own sums as they are and the others' as they were encoded, and get other
// bits.
bool supports_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec) {
  return spec.codec == nullptr && supports_all_reduce_hierarchical(spec);
}

Schedule plan_all_reduce_hierarchical(const CollectiveSpec& spec) {
  return Plan(with_usable_shares(spec), "all_reduce_hierarchical", false).run();
}

Cost cost_all_reduce_hierarchical(const CollectiveSpec& spec) { return cost(with_usable_shares(spec), false); }

Schedule plan_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec) {
  return Plan(spec, "all_reduce_hierarchical_one_shot", true).run();
}

Cost cost_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec) { return cost(spec, true); }

Schedule plan_reduce_hierarchical(const CollectiveSpec& spec) {
  return Plan(with_usable_shares(spec), "reduce_hierarchical", false, true).run();
}

Cost cost_reduce_hierarchical(const CollectiveSpec& spec) { return cost(with_usable_shares(spec), false, true); }

}  // namespace zeropg

// All-reduce over several nodes: reduce-scatter in each node, exchange between nodes, all-gather in each node.
//
// Two variants, equal but for the exchange. `all_reduce_hierarchical` completes each part on one node and sends it
// back: 2 (m - 1) / m times the bytes cross each node's link, the lower bound. `all_reduce_hierarchical_one_shot` sends
// all partial sums to all nodes, each of which completes everything: one message deep, (m - 1) times the bytes.
//
// Note [Pipeline between nodes]
// Several chunks are under way. In slot t, that is between two barriers, a rank
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

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/internode_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 3;         // of a pair: the partial sums of two chunks and a completed slice
constexpr int32_t kMessagesUnderWayOneShot = 2;  // the partial sums of two chunks

struct Sizes {
  int64_t alignment;
  Chunks chunks;
};

Sizes sizes_of(const CollectiveSpec& spec, bool is_one_shot) {
  const int32_t under_way = is_one_shot ? kMessagesUnderWayOneShot : kMessagesUnderWay;
  const int64_t alignment = exchange_alignment(spec, 1, under_way);
  // A message is at most a slice of the larger node of a pair.
  const int64_t slices = int64_t{second_smallest_node_size(spec)} * (is_one_shot ? 1 : node_count(spec));
  const int64_t most = std::min(network_chunk_bytes(spec, spec.bytes, alignment),
                                slices * largest_message_bytes(spec, under_way, alignment));
  return {alignment, equal_chunks(spec.bytes, most, alignment)};
}

class Plan {
 public:
  Plan(const CollectiveSpec& spec, std::string_view name, bool is_one_shot)
      : spec_(spec),
        is_one_shot_(is_one_shot),
        sizes_(sizes_of(spec, is_one_shot)),
        placement_(spec),
        layout_(is_one_shot ? ChunkLayout::of_one_part(placement_, sizes_.chunks.bytes, sizes_.alignment)
                            : ChunkLayout::of_equal_parts(placement_, sizes_.chunks.bytes, sizes_.alignment)),
        between_(spec, placement_, layout_),
        schedule_(make_schedule(name, sizes_.chunks.count)) {}

  // `is_reduce`: only the root wants the result, so only its node gets the completed parts.
  Schedule run(bool is_reduce) && {
    const int64_t lag = is_one_shot_ ? 2 : 3;  // slots from a chunk's reduction to its copying out
    const bool stages_results = !is_reduce || placement_.node() == placement_.node_of(spec_.root);
    const bool copies_out = !is_reduce || spec_.rank == spec_.root;
    if (sizes_.chunks.count > 0) schedule_.scratch_bytes = between_.scratch_bytes();
    if (is_chunk(0)) stage_inputs(schedule_, 0, inputs(0), layout_, placement_);
    for (int64_t slot = 0; slot < sizes_.chunks.count + lag && sizes_.chunks.count > 0; ++slot) {
      if (is_chunk(slot) || is_chunk(slot - lag)) add_barrier(schedule_);
      if (is_chunk(slot)) {
        reduce_in_node(schedule_, slot, inputs(slot), layout_, placement_,
                       [&](int32_t part, int64_t place) { return between_.partial(slot, part, place); });
        between_.send_partials(schedule_, slot, inputs(slot));
      }
      if (is_chunk(slot - lag) && copies_out) {
        copy_out(schedule_, slot - lag, outputs(slot - lag), layout_, placement_);
      }
      if (is_chunk(slot + 1)) stage_inputs(schedule_, slot + 1, inputs(slot + 1), layout_, placement_);
      if (is_one_shot_) {
        if (is_chunk(slot - 1)) complete_in_staging(slot - 1);
        continue;
      }
      if (is_chunk(slot - 1)) complete(slot - 1, is_reduce);
      if (is_chunk(slot - 2) && stages_results) stage_results(slot - 2);
    }
    return std::move(schedule_);
  }

 private:
  bool is_chunk(int64_t chunk) const { return chunk >= 0 && chunk < sizes_.chunks.count; }
  std::vector<Extent> inputs(int64_t chunk) const {
    const auto [offset, bytes] = part_of(spec_.bytes, sizes_.chunks.bytes, chunk);
    return extents_of_range(input(offset), bytes);
  }
  std::vector<Extent> outputs(int64_t chunk) const {
    const auto [offset, bytes] = part_of(spec_.bytes, sizes_.chunks.bytes, chunk);
    return extents_of_range(output(offset), bytes);
  }
  RegionOfPlace staged(int64_t chunk) const {
    return [this, chunk](int64_t place) { return staging(spec_.rank, chunk, place); };
  }

  void complete_in_staging(int64_t chunk) { between_.complete(schedule_, chunk, inputs(chunk), staged(chunk)); }

  // Into scratch: the own slot's place is still read by the ranks that copy an earlier chunk out.
  void complete(int64_t chunk, bool is_reduce) {
    const RegionOfPlace completed = [&](int64_t place) { return between_.completed(chunk, place); };
    between_.complete(schedule_, chunk, inputs(chunk), completed);
    const std::vector<int32_t> root_node{placement_.node_of(spec_.root)};
    between_.send_completed(schedule_, is_reduce ? root_node : placement_.other_nodes(), inputs(chunk), completed);
  }

  void stage_results(int64_t chunk) {
    for (const Extent& extent : cut(inputs(chunk), layout_.own_slice(layout_.part_of_node(placement_.node())))) {
      const auto [place, bytes] = extent.places;
      add_copy(schedule_, staging(spec_.rank, chunk, place), between_.completed(chunk, place), bytes);
    }
    between_.receive_completed(schedule_, inputs(chunk), staged(chunk));
  }

  const CollectiveSpec& spec_;
  const bool is_one_shot_;
  const Sizes sizes_;
  const Placement placement_;
  const ChunkLayout layout_;
  const InternodePhases between_;
  Schedule schedule_;
};

// Through staging as within a node; then a rank's slice, 1 / n of the tensor, is added over m nodes: all of it in one
// shot, otherwise one part of m, which is staged as well.
Cost cost(const CollectiveSpec& spec, bool is_one_shot) {
  const double nodes = node_count(spec);
  const double chunks = sizes_of(spec, is_one_shot).chunks.count;
  const double overlap = is_one_shot ? 2 : 3;
  const double slice = static_cast<double>(spec.bytes) / largest_node_size(spec);
  const double reading = is_one_shot ? nodes : (nodes + 3) / nodes - 1;
  return {.barriers = chunks == 0 ? 1 : chunks + std::min(chunks, overlap),
          .memory_bytes = 5.0 * spec.bytes + reading * slice,
          .network_hops = chunks == 0   ? 0
                          : is_one_shot ? 1.0
                                        : 2.0,
          .network_bytes = (is_one_shot ? nodes - 1 : 2 * (nodes - 1) / nodes) * spec.bytes};
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
  return Plan(spec, "all_reduce_hierarchical", false).run(false);
}

Cost cost_all_reduce_hierarchical(const CollectiveSpec& spec) { return cost(spec, false); }

Schedule plan_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec) {
  return Plan(spec, "all_reduce_hierarchical_one_shot", true).run(false);
}

Cost cost_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec) { return cost(spec, true); }

Schedule plan_reduce_hierarchical(const CollectiveSpec& spec) {
  return Plan(spec, "reduce_hierarchical", false).run(true);
}

Cost cost_reduce_hierarchical(const CollectiveSpec& spec) { return cost(spec, false); }

}  // namespace zeropg

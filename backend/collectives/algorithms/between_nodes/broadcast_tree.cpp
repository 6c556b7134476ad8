// Broadcast over several nodes: chunks go from node to node, each rank carrying its slice, and through staging inside.
//
// `broadcast_tree` is binomial, log2(m) messages deep; `broadcast_chain` passes chunks from each node to the next, so
// that every link carries the tensor once, which is right when there are many chunks. Nodes of a rack follow each
// other, so that the chain enters and leaves each rack once. No rank waits in a circle: the receives of a chunk wait
// for sends nearer to the root, a send for receives of the chunk before.
#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 2;  // so that one chunk travels while the next is taken in

// Who passes to whom among nodes 0 (the root's) to count - 1.
struct Tree {
  int32_t parent;
  std::vector<int32_t> children;  // those with the most below them first
};

Tree binomial(int32_t node, int32_t count) {
  Tree tree{.parent = 0, .children = {}};
  int32_t step = 1;
  for (; step <= node; step *= 2) {
    if ((node & step) != 0) tree.parent = node - step;  // in the end the highest bit
  }
  for (; node + step < count; step *= 2) tree.children.push_back(node + step);
  return tree;
}

Tree chain(int32_t node, int32_t count) {
  Tree tree{.parent = node - 1, .children = {}};
  if (node + 1 < count) tree.children.push_back(node + 1);
  return tree;
}

// All nodes, from the root's on, rack by rack.
std::vector<int32_t> order_from(const CollectiveSpec& spec, int32_t root_node) {
  std::vector<std::vector<int32_t>> racks = spec.racks;
  if (racks.empty()) {
    racks.emplace_back(node_count(spec));
    std::iota(racks[0].begin(), racks[0].end(), 0);
  }
  const auto has_root = [&](const std::vector<int32_t>& rack) {
    return std::ranges::find(rack, root_node) != rack.end();
  };
  std::rotate(racks.begin(), std::ranges::find_if(racks, has_root), racks.end());
  std::rotate(racks[0].begin(), std::ranges::find(racks[0], root_node), racks[0].end());
  std::vector<int32_t> order;
  for (const std::vector<int32_t>& rack : racks) order.insert(order.end(), rack.begin(), rack.end());
  return order;
}

Schedule plan(std::string_view name, const CollectiveSpec& spec, Tree (*tree_of)(int32_t, int32_t)) {
  const WholeChunks sizes = cut_whole(spec, kMessagesUnderWay);
  const Placement placement(spec);
  const ChunkLayout layout = ChunkLayout::of_one_part(placement, sizes.chunks.bytes, sizes.alignment);
  const int32_t root_node = placement.node_of(spec.root);
  const bool is_at_root = placement.node() == root_node;
  const std::vector<int32_t> order = order_from(spec, root_node);
  const auto position = std::ranges::find(order, placement.node()) - order.begin();
  const Tree tree = tree_of(static_cast<int32_t>(position), placement.node_count());
  const InternodePhases between(spec, placement, layout);
  Schedule schedule = make_schedule(name, sizes.chunks.count);
  if (sizes.chunks.count == 0) return schedule;
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, sizes.chunks.count); };
  const std::vector<Extent> outputs = extents_of_range(output(0), sizes.chunks);
  // Where a rank's slice of a chunk lies: in the root's slot, or in the slot of the rank that received it.
  const auto slot_of = [&](int32_t local_rank) { return is_at_root ? spec.root : placement.local_ranks()[local_rank]; };
  const auto own_slice = [&](int64_t place) { return staging(slot_of(placement.local_rank()), 0, place); };
  const auto pass_on = [&](PipelineStage at) {
    std::vector<int32_t> children;
    for (const int32_t child : tree.children) children.push_back(order[child]);
    between.send_completed(at, children, outputs, own_slice);
  };
  add_barrier({schedule, 0, sizes.chunks.count + 1});
  if (is_at_root) pass_on(stage(1));
  for (int32_t local_rank = 0; local_rank < placement.node_size(placement.node()); ++local_rank) {
    if (spec.rank == spec.root) continue;
    for (const Extent& extent : cut(outputs, layout.slice(0, placement.node(), local_rank))) {
      add_copy(stage(1), extent.tensor, staging(slot_of(local_rank), 0, extent.places.offset_bytes), extent.bytes());
    }
  }
  if (spec.rank == spec.root) {
    add_copy(stage(0), staging(spec.root, 0, 0), with_stride(input(0), sizes.chunks.bytes), sizes.chunks);
  } else if (!is_at_root) {
    between.receive_completed(stage(0), order[tree.parent], outputs, own_slice);
    pass_on(stage(0));
  }
  return schedule;
}

Cost cost(const CollectiveSpec& spec, double hops, double copies_of_root) {
  return {.barriers = 1.0 + cut_whole(spec, kMessagesUnderWay).chunks.count,
          .memory_bytes = 2.0 * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : hops,
          .network_bytes = copies_of_root * spec.bytes,
          .messages = (1.0 + copies_of_root) * cut_whole(spec, kMessagesUnderWay).chunks.count};
}

}  // namespace

bool supports_broadcast_nodes(const CollectiveSpec& spec) {
  return !is_one_node(spec) && can_exchange(spec, 1, kMessagesUnderWay);
}

Schedule plan_broadcast_tree(const CollectiveSpec& spec) { return plan("broadcast_tree", spec, binomial); }

Cost cost_broadcast_tree(const CollectiveSpec& spec) {
  double depth = 0;
  for (int32_t reached = 1; reached < node_count(spec); reached *= 2) ++depth;
  return cost(spec, depth, depth);
}

Schedule plan_broadcast_chain(const CollectiveSpec& spec) { return plan("broadcast_chain", spec, chain); }

Cost cost_broadcast_chain(const CollectiveSpec& spec) { return cost(spec, node_count(spec) - 1.0, 1); }

}  // namespace zeropg

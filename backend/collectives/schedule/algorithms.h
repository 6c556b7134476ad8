// Every algorithm: a pure planner function and its cost, both defined in <op>_<algorithm>.cpp.
#pragma once

#include <vector>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// What crosses links, in one direction.
struct LinkBytes {
  std::vector<double> of_nodes{};    // each node's link; empty: all alike
  std::vector<double> of_uplinks{};  // each rack's link to all others; empty: not counted
};

// What the busiest rank has to do; multiplied by a CostModel (select.h) it is a time. It must not depend on
// CollectiveSpec::rank, because all ranks have to choose the same algorithm.
struct Cost {
  double barriers = 0;
  double memory_bytes = 0;   // read plus written
  double far_bytes = 0;      // of these, read in other domains of the node; direct ones say none, to stay preferred
  double network_hops = 0;   // messages between nodes that wait for each other
  double network_bytes = 0;  // through the busiest link of a node, in one direction
  LinkBytes links{};
  double messages = 0;      // to and from other nodes, sent plus received
  bool is_in_line = false;  // each message waits for the one before, so that the processor waits for links
};

// Every rank stages its input, and after one barrier reduces the inputs of all: fewest barriers.
Schedule plan_all_reduce_one_shot(const CollectiveSpec& spec);
Cost cost_all_reduce_one_shot(const CollectiveSpec& spec);

// Every rank reduces its share of each chunk for all: fewest bytes. Pipelined, one barrier per chunk and one more.
Schedule plan_all_reduce_staged(const CollectiveSpec& spec);
Cost cost_all_reduce_staged(const CollectiveSpec& spec);

// Reduce-scatter in the domains of a node, exchange of the shares between domains, all-gather in the domains.
Schedule plan_all_reduce_domains(const CollectiveSpec& spec);
Cost cost_all_reduce_domains(const CollectiveSpec& spec);

// The halves of it, and a broadcast that enters every domain once.
Schedule plan_reduce_scatter_domains(const CollectiveSpec& spec);
Cost cost_reduce_scatter_domains(const CollectiveSpec& spec);
Schedule plan_all_gather_domains(const CollectiveSpec& spec);
Cost cost_all_gather_domains(const CollectiveSpec& spec);
Schedule plan_broadcast_domains(const CollectiveSpec& spec);
Cost cost_broadcast_domains(const CollectiveSpec& spec);

// The following pass each chunk through staging once: one barrier per chunk.
Schedule plan_reduce_staged(const CollectiveSpec& spec);
Cost cost_reduce_staged(const CollectiveSpec& spec);

Schedule plan_reduce_scatter_staged(const CollectiveSpec& spec);
Cost cost_reduce_scatter_staged(const CollectiveSpec& spec);

Schedule plan_all_gather_staged(const CollectiveSpec& spec);
Cost cost_all_gather_staged(const CollectiveSpec& spec);

Schedule plan_gather_staged(const CollectiveSpec& spec);
Cost cost_gather_staged(const CollectiveSpec& spec);

Schedule plan_scatter_staged(const CollectiveSpec& spec);
Cost cost_scatter_staged(const CollectiveSpec& spec);

Schedule plan_broadcast_staged(const CollectiveSpec& spec);
Cost cost_broadcast_staged(const CollectiveSpec& spec);

// One peer after another, at increasing distance, in pieces that fit the mailboxes.
Schedule plan_all_to_all_pairwise(const CollectiveSpec& spec);
Cost cost_all_to_all_pairwise(const CollectiveSpec& spec);

// The following are direct (direct.h): tensors in shared memory are read and written where they lie.
Schedule plan_all_reduce_direct(const CollectiveSpec& spec);
Cost cost_all_reduce_direct(const CollectiveSpec& spec);

Schedule plan_reduce_scatter_direct(const CollectiveSpec& spec);
Cost cost_reduce_scatter_direct(const CollectiveSpec& spec);

Schedule plan_all_gather_direct(const CollectiveSpec& spec);
Cost cost_all_gather_direct(const CollectiveSpec& spec);

Schedule plan_broadcast_direct(const CollectiveSpec& spec);
Cost cost_broadcast_direct(const CollectiveSpec& spec);

Schedule plan_all_to_all_direct(const CollectiveSpec& spec);
Cost cost_all_to_all_direct(const CollectiveSpec& spec);

// With a codec on one node: every rank exchanges encoded bytes with every other one, through mailboxes.
bool supports_compressed_exchange(const CollectiveSpec& spec);
Schedule plan_all_reduce_compressed(const CollectiveSpec& spec);
Cost cost_all_reduce_compressed(const CollectiveSpec& spec);
Schedule plan_reduce_scatter_compressed(const CollectiveSpec& spec);
Cost cost_reduce_scatter_compressed(const CollectiveSpec& spec);
Schedule plan_all_gather_compressed(const CollectiveSpec& spec);
Cost cost_all_gather_compressed(const CollectiveSpec& spec);

Schedule plan_barrier(const CollectiveSpec& spec);
Cost cost_barrier(const CollectiveSpec& spec);

// The following are for groups of several nodes. Gather, scatter and all-to-all above serve those too.

// Reduce-scatter in the nodes, exchange of the shares between nodes, all-gather in the nodes. One shot: all partial
// sums go to all nodes. Reduce: the completed shares go to the root's node only.
bool supports_all_reduce_hierarchical(const CollectiveSpec& spec);
Schedule plan_all_reduce_hierarchical(const CollectiveSpec& spec);
Cost cost_all_reduce_hierarchical(const CollectiveSpec& spec);
bool supports_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec);
Schedule plan_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec);
Cost cost_all_reduce_hierarchical_one_shot(const CollectiveSpec& spec);
Schedule plan_reduce_hierarchical(const CollectiveSpec& spec);
Cost cost_reduce_hierarchical(const CollectiveSpec& spec);

// Over racks of nodes, one level inside the other: less over the uplinks of racks, and fewer messages in large groups.
bool supports_all_reduce_racks(const CollectiveSpec& spec);
Schedule plan_all_reduce_racks(const CollectiveSpec& spec);
Cost cost_all_reduce_racks(const CollectiveSpec& spec);

// Likewise with one hop more than all nodes with all, for blocks that are worth it.
bool supports_reduce_scatter_racks(const CollectiveSpec& spec);
Schedule plan_reduce_scatter_racks(const CollectiveSpec& spec);
Cost cost_reduce_scatter_racks(const CollectiveSpec& spec);
bool supports_all_gather_racks(const CollectiveSpec& spec);
Schedule plan_all_gather_racks(const CollectiveSpec& spec);
Cost cost_all_gather_racks(const CollectiveSpec& spec);
// With one output for the ranks of each node.
bool supports_all_gather_racks_per_node(const CollectiveSpec& spec);
Schedule plan_all_gather_racks_per_node(const CollectiveSpec& spec);
Cost cost_all_gather_racks_per_node(const CollectiveSpec& spec);

// Between nodes in pairs at doubling distances: few messages, one after the other. Halving: each pair exchanges half of
// what the one before did, and goes back the same way: fewest bytes.
bool supports_all_reduce_doubling(const CollectiveSpec& spec);
Schedule plan_all_reduce_doubling(const CollectiveSpec& spec);
Cost cost_all_reduce_doubling(const CollectiveSpec& spec);
bool supports_all_reduce_halving(const CollectiveSpec& spec);
Schedule plan_all_reduce_halving(const CollectiveSpec& spec);
Cost cost_all_reduce_halving(const CollectiveSpec& spec);

// Every block crosses to its node as partial sums, once from each other node.
bool supports_reduce_scatter_hierarchical(const CollectiveSpec& spec);
Schedule plan_reduce_scatter_hierarchical(const CollectiveSpec& spec);
Cost cost_reduce_scatter_hierarchical(const CollectiveSpec& spec);

// Every block crosses to each other node once.
bool supports_all_gather_hierarchical(const CollectiveSpec& spec);
Schedule plan_all_gather_hierarchical(const CollectiveSpec& spec);
Cost cost_all_gather_hierarchical(const CollectiveSpec& spec);

// The same messages, into one output for all ranks of the node (CollectiveSpec::has_node_output). Direct.
bool supports_all_gather_per_node(const CollectiveSpec& spec);
Schedule plan_all_gather_per_node(const CollectiveSpec& spec);
Cost cost_all_gather_per_node(const CollectiveSpec& spec);

// A binomial tree or a chain of nodes.
bool supports_broadcast_nodes(const CollectiveSpec& spec);
Schedule plan_broadcast_tree(const CollectiveSpec& spec);
Cost cost_broadcast_tree(const CollectiveSpec& spec);
Schedule plan_broadcast_chain(const CollectiveSpec& spec);
Cost cost_broadcast_chain(const CollectiveSpec& spec);

// A dissemination among the first ranks of the nodes.
Schedule plan_barrier_dissemination(const CollectiveSpec& spec);
Cost cost_barrier_dissemination(const CollectiveSpec& spec);

}  // namespace zeropg

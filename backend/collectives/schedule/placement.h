// Where the ranks of a collective are: a view of CollectiveSpec::nodes that algorithms ask.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/collective_spec.h"

namespace zeropg {

// Nodes in the order of CollectiveSpec::nodes, ranks of a node in ascending order; nodes may differ in size, and the
// ranks of one need not be neighbours. Without nodes in the specification all ranks are on one.
// Invariant: every rank is on exactly one node (throws std::invalid_argument otherwise).
class Placement {
 public:
  explicit Placement(const CollectiveSpec& spec);
  // The same of the domains of one node, each of which counts as a node.
  static Placement over_domains(const CollectiveSpec& spec);

  int32_t node_count() const { return static_cast<int32_t>(nodes_.size()); }
  int32_t node_size(int32_t node) const { return static_cast<int32_t>(nodes_[node].size()); }
  int32_t rank_at(int32_t node, int32_t local_rank) const { return nodes_[node][local_rank]; }
  int32_t node_of(int32_t rank) const { return node_of_[rank]; }
  int32_t local_rank_of(int32_t rank) const { return local_rank_of_[rank]; }

  // Of the specification's own rank.
  int32_t node() const { return node_of_[rank_]; }
  int32_t local_rank() const { return local_rank_of_[rank_]; }
  const std::vector<int32_t>& local_ranks() const { return nodes_[node()]; }
  // The other nodes, starting behind the own one: if all ranks go this way round, no node is sent to by all at once.
  const std::vector<int32_t>& other_nodes() const { return other_nodes_; }

 private:
  int32_t rank_;
  std::vector<std::vector<int32_t>> nodes_;
  std::vector<int32_t> node_of_;
  std::vector<int32_t> local_rank_of_;
  std::vector<int32_t> other_nodes_;
};

// Cheap facts of a specification.
inline bool is_one_node(const CollectiveSpec& spec) { return spec.nodes.size() < 2; }
int32_t node_count(const CollectiveSpec& spec);
int32_t size_of_root_node(const CollectiveSpec& spec);
// Throws std::invalid_argument unless CollectiveSpec::node_shares are empty or as they should be.
void check_shares(const CollectiveSpec& spec);
// By node, the sum is 1: CollectiveSpec::node_shares, or equal ones.
std::vector<double> shares_of_nodes(const CollectiveSpec& spec);
// By node: its rack. Throws std::invalid_argument where the racks do not hold every node once.
std::vector<int32_t> rack_of_nodes(const CollectiveSpec& spec);
int32_t smallest_domain_size(const CollectiveSpec& spec);
// Ranks in other domains than its own, of a rank that has most of them; 0 where there are no domains.
int32_t far_ranks(const CollectiveSpec& spec);
int32_t largest_node_size(const CollectiveSpec& spec);
// Of the two smallest nodes the larger one's size: two nodes have at least this many ranks on one side.
int32_t second_smallest_node_size(const CollectiveSpec& spec);

}  // namespace zeropg

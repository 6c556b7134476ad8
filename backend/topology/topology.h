// Which ranks of a group share a node, and a domain of it. Pure data; built by the bootstrap or from a literal in
// tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zeropg {

struct Topology {
  std::vector<std::string> host_ids;  // per rank
  int32_t rank = 0;

  // Derived by make_topology:
  std::vector<std::vector<int32_t>> nodes;  // ascending ranks of each node, by first rank (the leader)
  std::vector<int32_t> node_rank;           // per rank: index into nodes
  std::vector<int32_t> local_rank;          // per rank: index inside its node
  // Of each node the ranks of each domain, ordered likewise; a node where not all ranks name one has none.
  std::vector<std::vector<std::vector<int32_t>>> domains;

  int32_t world_size() const { return static_cast<int32_t>(host_ids.size()); }
  int32_t node_count() const { return static_cast<int32_t>(nodes.size()); }
  bool is_one_node() const { return nodes.size() == 1; }
  const std::vector<int32_t>& own_node() const { return nodes[node_rank[rank]]; }
  bool is_on_this_node(int32_t peer) const { return node_rank[peer] == node_rank[rank]; }
  std::vector<int32_t> own_ranks(std::vector<int32_t> places) const;  // which ranks have these local ranks on this node
  std::vector<int32_t> others_than(int32_t peer) const;               // all ranks but one
};

// Ranks with equal host ids share a node; those of a node with equal domain ids share a domain: their CPUs share a
// cache, or the way to their memory. One of each per rank; an empty domain id is none.
Topology make_topology(std::vector<std::string> host_ids, const std::vector<std::string>& domain_ids, int32_t rank);
// One row per node: its number, host id and ranks, by domains where it has several, with bars between; a star marks
// `topology.rank`.
std::string to_table(const Topology& topology);

}  // namespace zeropg

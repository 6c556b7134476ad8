// Which ranks of a group share a node, and a domain of it, which nodes share a rack, and what their links carry. Pure
// data; built by the bootstrap or from a literal in tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/topology/link_model.h"

namespace zeropg {

// Where a rank says that it is.
struct RankPlace {
  std::string host_id;    // ranks with equal ones share a node
  std::string domain_id;  // ranks of a node with equal ones share a domain: a cache, or the way to their memory
  std::string rack_id;    // nodes with equal ones share a rack. In this and the last one empty: none is known

  bool operator==(const RankPlace&) const = default;
};

struct Topology {
  std::vector<std::string> host_ids;  // per rank
  int32_t rank = 0;

  // Derived by make_topology:
  std::vector<std::vector<int32_t>> nodes;  // ascending ranks of each node, by first rank (the leader)
  std::vector<int32_t> node_rank;           // per rank: index into nodes
  std::vector<int32_t> local_rank;          // per rank: index inside its node
  // Of each node the ranks of each domain, ordered likewise; a node where not all ranks name one has none.
  std::vector<std::vector<std::vector<int32_t>>> domains;
  std::vector<std::vector<int32_t>> racks;  // nodes of each rack, by first node; empty: not all ranks name one
  std::vector<std::string> rack_ids;        // of each of `racks`

  LinkModel links;  // as measured, or as the topology file says

  int32_t world_size() const { return static_cast<int32_t>(host_ids.size()); }
  int32_t node_count() const { return static_cast<int32_t>(nodes.size()); }
  bool is_one_node() const { return nodes.size() == 1; }
  const std::vector<int32_t>& own_node() const { return nodes[node_rank[rank]]; }
  bool is_on_this_node(int32_t peer) const { return node_rank[peer] == node_rank[rank]; }
  std::vector<int32_t> own_ranks(std::vector<int32_t> places) const;  // which ranks have these local ranks on this node
  std::vector<int32_t> others_than(int32_t peer) const;               // all ranks but one
};

// `places`: one per rank. The rack of a node is that of its leader: who asks others has them agree before.
Topology make_topology(const std::vector<RankPlace>& places, int32_t rank);
KnownLinks known_links(const Topology& topology);
// What is known of the links of all nodes of a topology, and of those of all its racks; empty: not of all.
LinkModel links_of(const Topology& topology, const KnownLinks& known);
// One row per node: its number, host id and ranks, by domains where it has several, with bars between; a star marks
// `topology.rank`. Where they are known, its rack, and what its link carries in GB/s, with the uplinks below.
std::string to_table(const Topology& topology);

}  // namespace zeropg

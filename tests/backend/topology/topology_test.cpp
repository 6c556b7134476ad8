#include "backend/topology/topology.h"

#include <gtest/gtest.h>

#include "backend/diagnostics/format_ranks.h"
#include "backend/topology/topology_probe.h"

namespace zeropg {
namespace {

using Ranks = std::vector<int32_t>;

std::vector<RankPlace> on_hosts(const std::vector<std::string>& host_ids) {
  std::vector<RankPlace> places;
  for (const std::string& host : host_ids) places.push_back({host, "", ""});
  return places;
}

TEST(Topology, GroupsRanksByHostInOrderOfFirstRank) {
  const Topology topology = make_topology(on_hosts({"b", "a", "b", "c", "a"}), 2);
  EXPECT_EQ(topology.rank, 2);
  EXPECT_EQ(topology.world_size(), 5);
  EXPECT_EQ(topology.nodes, (std::vector<Ranks>{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(topology.node_rank, (Ranks{0, 1, 0, 2, 1}));
  EXPECT_EQ(topology.local_rank, (Ranks{0, 0, 1, 0, 1}));
}

TEST(Topology, OneRankIsANode) {
  const Topology topology = make_topology(on_hosts({"a"}), 0);
  EXPECT_EQ(topology.node_count(), 1);
  EXPECT_EQ(topology.nodes[0], Ranks{0});
}

TEST(Topology, TableHasARowPerNode) {
  EXPECT_EQ(to_table(make_topology(on_hosts({"alpha", "b", "alpha"}), 1)),
            "node  host   ranks\n"
            "0     alpha  0 2\n"
            "1     b      1*\n");
}

TEST(Topology, TableShowsNoControlCharacters) {
  EXPECT_EQ(to_table(make_topology(on_hosts({"\x1b[31m\xff"}), 0)),
            "node  host    ranks\n"
            "0      [31m   0*\n");
}

TEST(Topology, GroupsTheRanksOfANodeByDomainInOrderOfFirstRank) {
  const Topology topology = make_topology(
      {{"a", "far", ""}, {"a", "near", ""}, {"b", "near", ""}, {"a", "far", ""}, {"b", "near", ""}, {"a", "near", ""}},
      0);
  ASSERT_EQ(topology.domains.size(), 2U);
  EXPECT_EQ(topology.domains[0], (std::vector<Ranks>{{0, 3}, {1, 5}}));
  EXPECT_EQ(topology.domains[1], (std::vector<Ranks>{{2, 4}}));
  EXPECT_EQ(to_table(topology),
            "node  host  ranks\n"
            "0     a     0* 3 | 1 5\n"
            "1     b     2 4\n");
}

TEST(Topology, ANodeHasDomainsOnlyIfAllItsRanksHave) {
  const Topology topology = make_topology({{"a", "x", ""}, {"a", "", ""}, {"b", "x", ""}}, 0);
  EXPECT_TRUE(topology.domains[0].empty());
  EXPECT_EQ(topology.domains[1], (std::vector<Ranks>{{2}}));
}

TEST(Topology, GroupsNodesByRackInOrderOfFirstNode) {
  Topology topology = make_topology({{"a", "", "far"}, {"b", "", "near"}, {"a", "", "far"}, {"c", "", "far"}}, 1);
  EXPECT_EQ(topology.racks, (std::vector<Ranks>{{0, 2}, {1}}));
  EXPECT_EQ(topology.rack_ids, (std::vector<std::string>{"far", "near"}));
  topology.links = {.node_bytes_per_us = {1250, 625, 1250}, .uplink_bytes_per_us = {25, 12.5}};
  EXPECT_EQ(to_table(topology),
            "node  rack  host  GB/s  ranks\n"
            "0     far   a     1.2   0 2\n"
            "1     near  b     0.62  1*\n"
            "2     far   c     1.2   3\n"
            "rack far: 0.025 GB/s to other racks\n"
            "rack near: 0.013 GB/s to other racks\n");
  EXPECT_TRUE(make_topology({{"a", "", "far"}, {"b", "", ""}}, 0).racks.empty());
}

TEST(Topology, SaysWhoIsOnTheNodeOfTheRank) {
  const Topology topology = make_topology(on_hosts({"a", "b", "a", "b"}), 3);
  EXPECT_FALSE(topology.is_one_node());
  EXPECT_EQ(topology.own_node(), (Ranks{1, 3}));
  EXPECT_TRUE(topology.is_on_this_node(1));
  EXPECT_FALSE(topology.is_on_this_node(2));
  EXPECT_EQ(topology.own_ranks({1, 0}), (Ranks{3, 1}));
  EXPECT_EQ(topology.others_than(2), (Ranks{0, 1, 3}));
}

TEST(Topology, ProbedHostIsTheSameTwice) {
  EXPECT_EQ(probe_host_id(), probe_host_id());
  EXPECT_EQ(probe_host_id().find('?'), std::string::npos);
}

TEST(RankNames, ReadAsWords) {
  EXPECT_EQ(format_ranks({3}), "rank 3");
  EXPECT_EQ(format_ranks({0, 2}), "ranks 0, 2");
}

}  // namespace
}  // namespace zeropg

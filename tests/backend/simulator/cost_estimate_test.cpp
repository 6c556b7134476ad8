// Estimates agree with closed formulas where there are any, and refuse what is not a question.
#include "backend/simulator/cost_estimate.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

namespace zeropg {
namespace {

std::vector<std::vector<int32_t>> even_nodes(int32_t node_count, int32_t node_size) {
  std::vector<std::vector<int32_t>> nodes(node_count, std::vector<int32_t>(node_size));
  for (int32_t node = 0; node < node_count; ++node) std::iota(nodes[node].begin(), nodes[node].end(), node * node_size);
  return nodes;
}

TEST(EstimateTest, ALargeAllReduceTakesTheTimeOfItsSlowLink) {
  EstimateRequest request{.bytes = 64 << 20, .nodes = even_nodes(4, 2)};
  request.model.network_bytes_per_us = 100;
  const Estimate result = estimate(request);
  EXPECT_EQ(result.algorithm, "all_reduce_hierarchical");
  EXPECT_TRUE(result.is_simulated);
  const double bound_us = 2 * 3.0 / 4 * request.bytes / 100;
  EXPECT_GE(result.time_us, bound_us);
  EXPECT_LT(result.time_us, 1.1 * bound_us);
  for (int32_t from = 0; from < 4; ++from) {
    for (int32_t to = 0; to < 4; ++to) {
      EXPECT_NEAR(result.link_bytes[from][to], from == to ? 0 : request.bytes / 2.0, 100'000);
    }
  }
}

TEST(EstimateTest, ASlowNodeSlowsAllDown) {
  EstimateRequest request{.bytes = 16 << 20, .nodes = even_nodes(3, 1)};
  const double fast_us = estimate(request).time_us;
  request.model.node_bytes_per_us = {1'250, 1'250, 125};
  EXPECT_GT(estimate(request).time_us, 4 * fast_us);
}

// It completes nothing, so that its link carries the bytes once each way; with equal shares it would be 1.5 times.
TEST(EstimateTest, ANodeOnALinkOfHalfTheSpeedTakesTwiceItsBytes) {
  EstimateRequest request{.bytes = 16 << 20, .nodes = even_nodes(4, 1)};
  request.model.node_bytes_per_us = {25, 25, 12.5, 25};
  const Estimate result = estimate(request);
  EXPECT_EQ(result.algorithm, "all_reduce_hierarchical");
  const double bound_us = request.bytes / 12.5;
  EXPECT_GE(result.time_us, bound_us);
  EXPECT_LT(result.time_us, 1.1 * bound_us);
}

// Over racks the uplinks carry 2 (r - 1) / r times the bytes, and the nodes' own links work meanwhile.
TEST(EstimateTest, SlowUplinksCarryTheLowerBound) {
  EstimateRequest request{.bytes = 16 << 20, .nodes = even_nodes(4, 1), .racks = {{0, 1}, {2, 3}}};
  request.model.network_bytes_per_us = 25;
  request.model.uplink_bytes_per_us = {6.25, 6.25};
  const Estimate result = estimate(request);
  EXPECT_EQ(result.algorithm, "all_reduce_racks");
  const double bound_us = request.bytes / 6.25;
  EXPECT_GE(result.time_us, bound_us);
  EXPECT_LT(result.time_us, 1.15 * bound_us);
  request.algorithm = "all_reduce_hierarchical";
  EXPECT_GT(estimate(request).time_us, 1.9 * bound_us);
}

// A broadcast's chain crosses each uplink once, in the hands of one rank.
TEST(EstimateTest, AChainOverRacksHasTheUplinksToItself) {
  EstimateRequest request{.op = OpKind::kBroadcast,
                          .bytes = 64 << 20,
                          .nodes = even_nodes(8, 4),
                          .algorithm = "broadcast_chain",
                          .racks = {{0, 1, 2, 3}, {4, 5, 6, 7}}};
  request.model.network_bytes_per_us = 100;
  request.model.uplink_bytes_per_us = {100, 100};
  const double bound_us = static_cast<double>(request.bytes) / 100;
  const double time_us = estimate(request).time_us;
  EXPECT_GE(time_us, bound_us);
  EXPECT_LT(time_us, 1.2 * bound_us);
}

TEST(EstimateTest, EveryOperationHasOneOnOneNodeAndOnMany) {
  for (size_t op = 0; op < kOpKindCount; ++op) {
    for (const auto& nodes : {even_nodes(1, 4), even_nodes(4, 1), even_nodes(3, 3), even_nodes(1, 1)}) {
      const Estimate result = estimate({.op = static_cast<OpKind>(op), .bytes = 4096, .nodes = nodes});
      EXPECT_TRUE(result.is_simulated);
      EXPECT_TRUE(result.time_us > 0 || nodes.size() * nodes[0].size() == 1) << result.algorithm;
    }
  }
}

TEST(EstimateTest, LargeGroupsAreSimulatedByNodesThatStandForOthers) {
  EstimateRequest request{.bytes = 1 << 30, .nodes = even_nodes(128, 8)};
  const Estimate result = estimate(request);
  EXPECT_TRUE(result.is_simulated);
  const double bound_us = 2.0 * 127 / 128 * (1 << 30) / 1'250;
  EXPECT_GE(result.time_us, bound_us);
  EXPECT_LT(result.time_us, 2 * bound_us);
  ASSERT_EQ(result.link_bytes.size(), 128);
  EXPECT_NEAR(result.link_bytes[5][4], 2.0 / 128 * (1 << 30), 0.01 * (1 << 30) / 128);
  request.model.node_bytes_per_us.assign(128, 1'250);
  request.model.node_bytes_per_us[77] = 625;
  EXPECT_GT(estimate(request).time_us, 1.8 * bound_us);
}

// A node stands for others only where the plans of all are the same but for a shift.
TEST(EstimateTest, LargeGroupsAreSimulatedWhoeverTheirNodesTalkTo) {
  EstimateRequest request{.bytes = 64, .nodes = even_nodes(64, 2)};
  const Estimate small = estimate(request);
  EXPECT_EQ(small.algorithm, "all_reduce_doubling");
  const CostModel model;
  EXPECT_NEAR(small.time_us, 6 * (model.hop_us + model.message_us), 10);
  for (int32_t rack = 0; rack < 8; ++rack) {
    request.racks.emplace_back(8);
    std::iota(request.racks.back().begin(), request.racks.back().end(), 8 * rack);
  }
  request.model.uplink_bytes_per_us.assign(8, 2'500);
  request.bytes = 64 << 20;
  const Estimate large = estimate(request);
  EXPECT_EQ(large.algorithm, "all_reduce_racks");
  EXPECT_TRUE(large.is_simulated);
  const double bound_us = 2 * 63.0 / 64 * static_cast<double>(request.bytes) / model.network_bytes_per_us;
  EXPECT_GE(large.time_us, bound_us);
  EXPECT_LT(large.time_us, 3 * bound_us);
}

TEST(EstimateTest, RefusesWhatIsNotAQuestion) {
  const auto nodes = even_nodes(2, 2);
  const std::vector<EstimateRequest> wrong{
      {.bytes = 4},
      {.bytes = 5, .nodes = nodes},
      {.bytes = -4, .nodes = nodes},
      {.bytes = 4, .element_bytes = 0, .nodes = nodes},
      {.bytes = 4, .root = 4, .nodes = nodes},
      {.bytes = 4, .nodes = {{0, 1}, {}}},
      {.bytes = 4, .nodes = {{0, 1}, {1}}},
      {.bytes = 4, .nodes = nodes, .algorithm = "all_reduce_rign"},
      {.bytes = 4, .nodes = nodes, .algorithm = "all_reduce_staged"},
      {.bytes = 4, .nodes = nodes, .model = {.network_bytes_per_us = 0}},
      {.bytes = 4, .nodes = nodes, .model = {.node_bytes_per_us = {1}}},
      {.bytes = 4, .nodes = nodes, .model = {.node_bytes_per_us = {1, -1}}},
      {.bytes = 4, .nodes = nodes, .model = {.uplink_bytes_per_us = {1}}, .racks = {{0}, {1}}},
      {.bytes = 4, .nodes = nodes, .racks = {{0}, {0, 1}}},
  };
  for (const EstimateRequest& request : wrong) EXPECT_THROW(estimate(request), std::invalid_argument);
}

}  // namespace
}  // namespace zeropg

// Times without bytes are those with bytes; one node stands for others that are like it; a few chunks for many.
#include "backend/simulator/time_simulator.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"
#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

constexpr double kLatencyUs = 20;
constexpr double kBytesPerUs = 100;

// The schedules of the first `count` nodes; each further node has node 0 stand for it.
TimedGroup group_of(const SimulatedCollective& collective, const Nodes& nodes, size_t count) {
  TimedGroup group{.nodes = nodes, .dtype = DType::kInt32};
  group.links = {.latency_us = kLatencyUs, .of_nodes = std::vector<double>(nodes.size(), kBytesPerUs)};
  for (size_t node = 0; node < nodes.size(); ++node) {
    group.stands_for.push_back(node < count ? static_cast<int32_t>(node) : 0);
    if (node >= count) continue;
    group.timed.push_back({.node = static_cast<int32_t>(node)});
    for (const int32_t rank : nodes[node]) group.timed.back().schedules.push_back(collective.schedules()[rank]);
  }
  return group;
}

CollectiveShape shape_of(const Nodes& nodes, int64_t numel) {
  int32_t world_size = 0;
  for (const auto& node : nodes) world_size += static_cast<int32_t>(node.size());
  return {.world_size = world_size,
          .numel = numel,
          .bank_bytes = 1 << 12,
          .mailbox_bytes = 1 << 20,
          .nodes = nodes,
          .window_bytes = 1 << 20};
}

TEST(TimeSimulatorTest, TakesTheTimeThatTheScheduleSimulatorSays) {
  for (const Algorithm& algorithm : algorithms()) {
    for (const Nodes& nodes : {nodes_of_sizes({1, 1}), nodes_of_sizes({1, 1, 1}), nodes_of_sizes({4})}) {
      const CollectiveShape shape = shape_of(nodes, 5000);
      const std::vector<Nodes> served = placements_of(algorithm, shape.world_size);
      if (std::find(served.begin(), served.end(), nodes) == served.end()) continue;
      const SimulatedCollective collective(algorithm, shape);
      SCOPED_TRACE(collective.describe());
      SimulatorOptions options = simulator_options(shape);
      options.link = [&](int32_t from, int32_t to) -> SimulatedLink {
        const Placement placement({.world_size = shape.world_size, .nodes = nodes});
        if (placement.node_of(from) == placement.node_of(to)) return {};
        return {kLatencyUs, kBytesPerUs, kBytesPerUs};
      };
      SimulatedOperation operation = collective.operation();
      double latest_us = 0;
      for (const Traffic& traffic : simulate(options, {operation})) latest_us = std::max(latest_us, traffic.time_us);
      TimedGroup group = group_of(collective, nodes, nodes.size());
      group.dtype = operation.dtype;
      // There a rank's link takes what its steps ask for first, here what comes first.
      const double tolerance = nodes.size() > 2 ? 0.15 : 1e-9;
      EXPECT_NEAR(simulate_time(group), latest_us, tolerance * latest_us);
    }
  }
}

Schedule one_message(StepKind kind, int32_t peer, int64_t bytes) {
  Schedule schedule;
  if (kind == StepKind::kSend) add_send(schedule, peer, input(0), bytes);
  if (kind == StepKind::kReceive) add_receive(schedule, peer, output(0), bytes);
  return schedule;
}

// Two racks of two nodes of two ranks each; node 0 and node 2 have slow links.
double time_of_senders(const std::vector<int32_t>& senders, int64_t bytes) {
  TimedGroup group{.nodes = nodes_of_sizes({2, 2, 2, 2}), .stands_for = {0, 1, 2, 3}};
  group.links = {
      .latency_us = kLatencyUs, .of_nodes = {40, 200, 40, 200}, .rack_of_nodes = {0, 0, 1, 1}, .of_uplinks = {50, 50}};
  group.model.message_us = 0;
  for (int32_t node = 0; node < 4; ++node) group.timed.push_back({.node = node, .schedules = {{}, {}}});
  for (const int32_t rank : senders) {  // to the same place in the other rack
    group.timed[rank / 2].schedules[rank % 2] = one_message(StepKind::kSend, rank + 4, bytes);
    group.timed[rank / 2 + 2].schedules[rank % 2] = one_message(StepKind::kReceive, rank, bytes);
  }
  return simulate_time(group);
}

TEST(TimeSimulatorTest, ALinkGivesAllItHasToASenderThatIsAlone) {
  constexpr int64_t kBytes = 10'000;
  EXPECT_DOUBLE_EQ(time_of_senders({2}, kBytes), kLatencyUs + kBytes / 50.0);            // the uplink's
  EXPECT_DOUBLE_EQ(time_of_senders({0}, kBytes), kLatencyUs + kBytes / 40.0);            // its node's
  EXPECT_DOUBLE_EQ(time_of_senders({0, 1}, kBytes), kLatencyUs + 2 * kBytes / 40.0);     // which two share
  EXPECT_DOUBLE_EQ(time_of_senders({2, 3}, kBytes), kLatencyUs + 2 * kBytes / 50.0);     // and the uplink
  EXPECT_DOUBLE_EQ(time_of_senders({0, 2, 3}, kBytes), kLatencyUs + 3 * kBytes / 50.0);  // of two nodes
}

TEST(TimeSimulatorTest, RingsOfNodesHaveDistancesAlongAndAcross) {
  const NodeRings rings{.nodes = 12, .ring_size = 4};
  EXPECT_EQ(rings.distance(1, 2), rings.distance(7, 4));   // the next one of a ring
  EXPECT_EQ(rings.distance(1, 5), rings.distance(10, 2));  // of the next ring, at the same place
  for (int32_t from = 0; from < 12; ++from) {
    for (int32_t to = 0; to < 12; ++to) {
      EXPECT_EQ(rings.at(from, rings.distance(from, to)), to);
      EXPECT_EQ(rings.from(to, rings.distance(from, to)), from);
      EXPECT_EQ(NodeRings({12, 12}).distance(from, to), (to - from + 12) % 12);
    }
  }
}

TEST(TimeSimulatorTest, OneNodeStandsForAllThatAreLikeIt) {
  for (const char* name : {"all_reduce_hierarchical", "all_reduce_hierarchical_one_shot", "all_gather_hierarchical",
                           "reduce_scatter_hierarchical"}) {
    const Nodes nodes = nodes_of_sizes({2, 2, 2, 2, 2, 2});
    const SimulatedCollective collective(*find_algorithm(name), shape_of(nodes, 6 * 2 * 64 * 5));
    const double all_us = simulate_time(group_of(collective, nodes, 6));
    EXPECT_NEAR(simulate_time(group_of(collective, nodes, 1)), all_us, 1e-9 * all_us) << name;
  }
}

TEST(TimeSimulatorTest, AFewChunksTellTheTimeOfMany) {
  const Nodes nodes = nodes_of_sizes({2, 2, 2});
  for (const char* name : {"all_reduce_hierarchical", "all_gather_hierarchical", "broadcast_chain"}) {
    const SimulatedCollective collective(*find_algorithm(name), shape_of(nodes, 1 << 18));
    const auto time_of = [&](int64_t chunks) {
      TimedGroup group = group_of(collective, nodes, 3);
      for (TimedNode& node : group.timed) {
        for (Schedule& schedule : node.schedules) schedule = shortened(schedule, chunks);
      }
      return simulate_time(group);
    };
    const double per_chunk_us = (time_of(16) - time_of(8)) / 8;
    EXPECT_NEAR(time_of(40), time_of(16) + 24 * per_chunk_us, 0.02 * time_of(40)) << name;
  }
}

TEST(TimeSimulatorTest, AShortenedScheduleEndsAsTheLongOneDoes) {
  Schedule schedule;
  add_barrier({schedule, 1, 12});
  add_copy({schedule, 0, 10}, output(0), input(0), {8, 3});
  add_send({schedule, 2, 9}, 1, input(0), 8);
  const Schedule few = shortened(schedule, 4);
  EXPECT_EQ(few.steps[0].chunks, 6);
  EXPECT_EQ(total_bytes(few.steps[1]), 3 * 8 + 3);
  EXPECT_EQ(few.steps[2].chunks, 4);
  EXPECT_EQ(shortened(schedule, 100).steps[0].chunks, 12);
}

TEST(TimeSimulatorTest, SaysWhoWaitsForWhatNobodySends) {
  Schedule schedule;
  add_receive(schedule, 1, output(0), 8);
  const TimedGroup group{.nodes = {{0}, {1}},
                         .timed = {{.node = 0, .schedules = {schedule}}},
                         .stands_for = {0, 0},
                         .links = {.of_nodes = {1, 1}}};
  EXPECT_THROW(simulate_time(group), SimulationError);
}

}  // namespace
}  // namespace zeropg

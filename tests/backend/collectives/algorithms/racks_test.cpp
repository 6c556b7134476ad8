// Collectives over racks: right bytes in every order, few of them over the uplinks, and sums in a fixed order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/select/select.h"
#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

struct Racks {
  Nodes nodes;
  Nodes racks;
};

// Even and uneven, of nodes in any order, with any number of ranks.
const std::vector<Racks>& many_racks() {
  static const std::vector<Racks> all{
      {nodes_of_sizes({1, 1, 1, 1}), {{0, 1}, {2, 3}}},
      {nodes_of_sizes({2, 2, 2, 2}), {{0, 2}, {1, 3}}},
      {nodes_of_sizes({1, 1, 1}), {{0, 1}, {2}}},
      {nodes_of_sizes({3, 1, 2}), {{0}, {1, 2}}},
      {nodes_in_turn(9, 3), {{0, 2}, {1}}},
      {nodes_of_sizes({1, 2, 1, 3, 1, 2}), {{0, 1}, {2, 3}, {4, 5}}},
      {nodes_of_sizes({1, 1, 1, 1, 1, 1}), {{0, 1, 2}, {3, 4}, {5}}},
      {nodes_of_sizes({2, 2, 2, 2, 2}), {{0, 1, 2}, {3, 4}}},
      {nodes_of_sizes({1, 1}), {{0}, {1}}},
  };
  return all;
}

CollectiveShape shape_of(const Racks& racks, int64_t numel) {
  int32_t world_size = 0;
  for (const auto& node : racks.nodes) world_size += static_cast<int32_t>(node.size());
  return {.world_size = world_size,
          .numel = numel,
          .bank_bytes = 1 << 16,
          .nodes = racks.nodes,
          .window_bytes = 1 << 16,
          .racks = racks.racks};
}

constexpr const char* kStaged[] = {"all_reduce_racks", "reduce_scatter_racks", "all_gather_racks"};
constexpr const char* kAll[] = {"all_reduce_racks", "reduce_scatter_racks", "all_gather_racks",
                                "all_gather_racks_per_node"};

TEST(RacksTest, GivesTheRightBytesInEverySizeAndOrder) {
  for (const char* name : kAll) {
    const Algorithm& algorithm = *find_algorithm(name);
    const bool can_be_in_place = algorithm.beside.empty();
    int served = 0;
    for (const Racks& racks : many_racks()) {
      for (const int64_t numel : {0, 1, 2, 37, 131, 1001, 2048, 9001}) {
        for (uint64_t seed = 0; seed < 8; ++seed) {
          CollectiveShape shape = shape_of(racks, algorithm.op == OpKind::kAllReduce ? numel : numel / 4);
          shape.bank_bytes = seed % 2 == 0 ? 1024 : 68;
          shape.window_bytes = seed % 3 == 0 ? 4096 : 1 << 16;
          shape.is_in_place = can_be_in_place && seed % 4 > 1;
          shape.is_list = can_be_in_place && !shape.is_in_place && seed % 4 == 1;
          shape.seed = seed;
          const SimulatedCollective collective(algorithm, shape);
          SCOPED_TRACE(collective.describe());
          if (!algorithm.supports(collective.specs()[0])) continue;
          simulate(simulator_options(shape), {collective.operation()});
          collective.expect_outputs();
          ++served;
        }
      }
    }
    EXPECT_GT(served, 400) << name;
  }
}

TEST(RacksTest, FollowsAndPrecedesOtherCollectivesOfItsGroup) {
  for (const Racks& racks : many_racks()) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      std::mt19937_64 random(seed);
      std::vector<SimulatedCollective> collectives;
      collectives.reserve(9);
      std::vector<SimulatedOperation> operations;
      CollectiveShape shape = shape_of(racks, 0);
      shape.bank_bytes = 1024;
      shape.window_bytes = 8192;
      for (int i = 0; i < 9; ++i) {
        constexpr const char* kOthers[] = {"all_reduce_hierarchical", "all_gather_hierarchical", "all_reduce_halving"};
        shape.numel = static_cast<int64_t>(random() % 900);
        shape.seed = random();
        collectives.emplace_back(*find_algorithm(i % 2 == 0 ? kStaged[random() % 3] : kOthers[random() % 3]), shape);
        operations.push_back(collectives.back().operation());
      }
      simulate(simulator_options(shape), operations);
      for (const SimulatedCollective& collective : collectives) collective.expect_outputs();
    }
  }
}

struct BothWays {
  double out = 0;
  double in = 0;
  double most() const { return std::max(out, in); }
};

// Of an all-reduce 2 (r - 1) / r times the bytes over each uplink, of blocks each once to each rack; and over a node's
// link no more than when all nodes exchange directly.
void expect_cost(const Algorithm& algorithm) {
  constexpr int64_t kNumel = 1 << 16;
  for (const Racks& racks : many_racks()) {
    CollectiveShape shape = shape_of(racks, kNumel);
    if (algorithm.op != OpKind::kAllReduce) shape.numel /= shape.world_size;
    const SimulatedCollective collective(algorithm, shape);
    SCOPED_TRACE(collective.describe());
    const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
    const Cost cost = algorithm.cost(collective.specs()[0]);
    const auto between = bytes_between_nodes(traffic, racks.nodes);
    const std::vector<int32_t> rack_of = rack_of_nodes(collective.specs()[0]);
    std::vector<BothWays> uplinks(racks.racks.size());
    std::vector<BothWays> links(racks.nodes.size());
    for (size_t from = 0; from < between.size(); ++from) {
      for (size_t to = 0; to < between.size(); ++to) {
        const auto bytes = static_cast<double>(between[from][to]);
        links[from].out += bytes;
        links[to].in += bytes;
        if (rack_of[from] == rack_of[to]) continue;
        uplinks[rack_of[from]].out += bytes;
        uplinks[rack_of[to]].in += bytes;
      }
    }
    for (size_t rack = 0; rack < uplinks.size(); ++rack) {
      EXPECT_NEAR(uplinks[rack].most(), cost.links.of_uplinks[rack], 0.05 * cost.links.of_uplinks[rack]);
    }
    for (size_t node = 0; node < links.size(); ++node) {
      EXPECT_NEAR(links[node].most(), cost.links.of_nodes[node], 0.05 * cost.links.of_nodes[node]);
    }
    int64_t memory_bytes = 0;
    for (const Traffic& rank : traffic) {
      EXPECT_EQ(rank.barriers, cost.barriers);
      memory_bytes = std::max(memory_bytes, rank.memory_bytes);
    }
    if (std::all_of(racks.nodes.begin(), racks.nodes.end(),
                    [&](const auto& node) { return node.size() == racks.nodes[0].size(); })) {
      EXPECT_NEAR(static_cast<double>(memory_bytes), cost.memory_bytes, 0.05 * cost.memory_bytes);
    }
  }
}

TEST(RacksTest, UplinksCarryTheLowerBoundAndCostsAreWhatTheFormulaSays) {
  for (const char* name : kStaged) expect_cost(*find_algorithm(name));
}

TEST(RacksTest, ChainsOfABroadcastEnterAndLeaveEachRackOnce) {
  for (const Racks& racks : many_racks()) {
    for (int32_t root = 0; root < shape_of(racks, 0).world_size; ++root) {
      CollectiveShape shape = shape_of(racks, 9000);
      shape.root = root;
      const SimulatedCollective collective(*find_algorithm("broadcast_chain"), shape);
      SCOPED_TRACE(collective.describe());
      const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
      collective.expect_outputs();
      const auto between = bytes_between_nodes(traffic, racks.nodes);
      const std::vector<int32_t> rack_of = rack_of_nodes(collective.specs()[0]);
      int64_t crossing = 0;
      for (size_t from = 0; from < between.size(); ++from) {
        for (size_t to = 0; to < between.size(); ++to) crossing += rack_of[from] != rack_of[to] ? between[from][to] : 0;
      }
      EXPECT_EQ(crossing, (static_cast<int64_t>(racks.racks.size()) - 1) * 9000);
    }
  }
}

// Ranks in order within a node, nodes in order within a rack, then racks in order; divided once, at the end.
void expect_order(const Algorithm& algorithm) {
  for (const Racks& racks : many_racks()) {
    const CollectiveShape shape = shape_of(racks, 1537);
    const SimulatedCollective collective(algorithm, shape);
    const bool has_blocks = algorithm.op == OpKind::kReduceScatter;
    const int64_t numel = (has_blocks ? shape.world_size : 1) * shape.numel;
    SCOPED_TRACE(collective.describe());
    std::mt19937_64 random(5);
    std::vector<std::vector<float>> inputs(shape.world_size, std::vector<float>(numel));
    for (auto& input : inputs) {
      for (float& value : input)
        value = std::ldexp(static_cast<float>(random() % 1000), static_cast<int>(random() % 20));
    }
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      std::memcpy(collective.tensors()[rank].inputs[0].data(), inputs[rank].data(), 4 * numel);
    }
    std::vector<float> expected(numel);
    for (int64_t i = 0; i < numel; ++i) {
      for (size_t rack = 0; rack < racks.racks.size(); ++rack) {
        float of_rack = 0;
        for (size_t n = 0; n < racks.racks[rack].size(); ++n) {
          float of_node = 0;
          for (const int32_t rank : racks.nodes[racks.racks[rack][n]]) of_node += inputs[rank][i];
          of_rack = n == 0 ? of_node : of_rack + of_node;
        }
        expected[i] = rack == 0 ? of_rack : expected[i] + of_rack;
      }
      expected[i] /= static_cast<float>(shape.world_size);
    }
    SimulatedOperation operation = collective.operation();
    operation.dtype = DType::kFloat32;
    operation.reduce_op = ReduceOp::kAverage;
    operation.factor = static_cast<double>(shape.world_size);
    simulate(simulator_options(shape), {operation});
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      const float* of_rank = expected.data() + (has_blocks ? rank * shape.numel : 0);
      EXPECT_EQ(std::memcmp(collective.tensors()[rank].outputs[0].data(), of_rank, 4 * shape.numel), 0);
    }
  }
}

TEST(RacksTest, AddsInAFixedOrderAndGivesAllRanksTheSameBits) {
  expect_order(*find_algorithm("all_reduce_racks"));
  expect_order(*find_algorithm("reduce_scatter_racks"));
}

TEST(RacksTest, IsChosenWhereUplinksAreSlowOrNodesAreMany) {
  CollectiveSpec spec{.op = OpKind::kAllReduce,
                      .world_size = 4,
                      .element_bytes = 4,
                      .bytes = 16 << 20,
                      .bank_bytes = 1 << 20,
                      .nodes = {{0}, {1}, {2}, {3}},
                      .racks = {{0, 1}, {2, 3}},
                      .window_bytes = 4 << 20};
  CostModel model;
  model.network_bytes_per_us = 25;
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "all_reduce_hierarchical");
  model.uplink_bytes_per_us = {6.25, 6.25};
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "all_reduce_racks");
  spec.op = OpKind::kReduceScatter;
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "reduce_scatter_racks");
  spec.op = OpKind::kAllGather;
  spec.has_node_output = true;
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "all_gather_racks");
  EXPECT_EQ(select_direct_algorithm(spec, {}, model)->name, "all_gather_racks_per_node");
  spec.bytes = 8;
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "all_gather_hierarchical");
  EXPECT_NE(select_direct_algorithm(spec, "all_gather_per_node", model), nullptr);
  spec.op = OpKind::kAllReduce;
  spec.has_node_output = false;
  EXPECT_EQ(select_algorithm(spec, {}, model).name, "all_reduce_hierarchical_one_shot");
  spec.racks = {{0, 1}, {2}};
  EXPECT_THROW(plan_all_reduce_racks(spec), std::invalid_argument);
  spec.racks.clear();
  EXPECT_FALSE(supports_all_reduce_racks(spec));
}

}  // namespace
}  // namespace zeropg

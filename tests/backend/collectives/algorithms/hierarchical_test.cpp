// What algorithms over several nodes promise beyond the right bytes: how much crosses each link, in which order sums
// are added, and how often they are rounded.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <tuple>

#include "backend/collectives/schedule/steps.h"
#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

struct CountedBytes {
  int64_t sent = 0;
  int64_t received = 0;
};

std::vector<CountedBytes> link_bytes(const std::vector<Traffic>& traffic, const Nodes& nodes) {
  const auto between = bytes_between_nodes(traffic, nodes);
  std::vector<CountedBytes> links(nodes.size());
  for (size_t from = 0; from < nodes.size(); ++from) {
    for (size_t to = 0; to < nodes.size(); ++to) {
      links[from].sent += between[from][to];
      links[to].received += between[from][to];
    }
  }
  return links;
}

// Sizes that every node's ranks divide, so that shares are equal.
const std::vector<Nodes>& many_nodes() {
  static const std::vector<Nodes> all{
      nodes_of_sizes({2, 2}),       nodes_of_sizes({1, 1}),    nodes_of_sizes({3, 1}), nodes_in_turn(8, 2),
      nodes_of_sizes({1, 1, 1, 1}), nodes_of_sizes({4, 2, 1}), nodes_in_turn(9, 3),    nodes_of_sizes({2, 1, 1, 3, 1}),
      nodes_in_turn(8, 8),          nodes_of_sizes({5, 3}),
  };
  return all;
}

int32_t world_size_of(const Nodes& nodes) {
  int32_t world_size = 0;
  for (const auto& node : nodes) world_size += static_cast<int32_t>(node.size());
  return world_size;
}

std::vector<Traffic> run(const SimulatedCollective& collective, const CollectiveShape& shape) {
  std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
  collective.expect_outputs();
  return traffic;
}

CollectiveShape shape_of(const Nodes& nodes, int64_t numel) {
  return {.world_size = world_size_of(nodes),
          .numel = numel,
          .root = world_size_of(nodes) - 1,
          .bank_bytes = 1 << 16,
          .nodes = nodes,
          .window_bytes = 1 << 16};
}

constexpr int64_t kNumel = 1 << 15;

TEST(HierarchicalTest, AllReduceSendsTheLowerBoundOverEveryLink) {
  for (const Nodes& nodes : many_nodes()) {
    const CollectiveShape shape = shape_of(nodes, kNumel);
    const SimulatedCollective collective(*find_algorithm("all_reduce_hierarchical"), shape);
    SCOPED_TRACE(collective.describe());
    const auto node_count = static_cast<double>(nodes.size());
    const double bound = 2 * (node_count - 1) / node_count * 4 * kNumel;
    // Parts are cut at cache lines, so that their sizes differ by up to one in each chunk and each phase.
    const double slack = 64 * 2 * node_count * 64;
    const Cost cost = find_algorithm("all_reduce_hierarchical")->cost(collective.specs()[0]);
    EXPECT_NEAR(cost.network_bytes, bound, 1);
    int64_t total = 0;
    for (const CountedBytes& link : link_bytes(run(collective, shape), nodes)) {
      EXPECT_NEAR(link.sent, bound, slack);
      EXPECT_NEAR(link.received, bound, slack);
      total += link.sent;
    }
    EXPECT_EQ(total, int64_t(2 * (nodes.size() - 1)) * 4 * kNumel);  // not a byte more than the bound
  }
}

// So each node may share an output or not.
TEST(HierarchicalTest, AGatherPerNodeSendsTheMessagesOfOneThatStages) {
  for (const Nodes& nodes : many_nodes()) {
    for (const int64_t numel : {0, 1, 300, 70'001}) {
      CollectiveShape shape = shape_of(nodes, numel);
      shape.bank_bytes = 5000;
      std::vector<std::vector<std::tuple<StepKind, int32_t, int64_t>>> messages;
      for (const char* name : {"all_gather_hierarchical", "all_gather_per_node"}) {
        const SimulatedCollective collective(*find_algorithm(name), shape);
        for (const Schedule& schedule : collective.unrolled_schedules()) {
          messages.emplace_back();
          for (const Step& step : schedule.steps) {
            if (step.peer >= 0) messages.back().emplace_back(step.kind, step.peer, step.bytes);
          }
        }
      }
      const auto half = messages.begin() + world_size_of(nodes);
      EXPECT_TRUE(std::equal(messages.begin(), half, half, messages.end())) << numel;
    }
  }
}

// Nodes complete what they are told to, down to nothing, and links carry what that makes.
TEST(HierarchicalTest, LinksCarryWhatTheSharesOfNodesMake) {
  const std::vector<std::pair<Nodes, std::vector<int32_t>>> cases{
      {nodes_of_sizes({1, 1, 1, 1}), {341, 342, 0, 341}},
      {nodes_of_sizes({2, 2, 2}), {0, 1024, 0}},
      {nodes_of_sizes({4, 2, 1}), {100, 900, 24}},
      {nodes_in_turn(9, 3), {512, 1, 511}},
      {nodes_of_sizes({2, 1, 1, 3, 1}), {200, 0, 300, 400, 124}},
  };
  for (const auto& [nodes, shares] : cases) {
    for (const int64_t window_bytes : {1 << 12, 1 << 16}) {
      CollectiveShape shape = shape_of(nodes, kNumel);
      shape.window_bytes = window_bytes;
      shape.node_shares = shares;
      const SimulatedCollective collective(*find_algorithm("all_reduce_hierarchical"), shape);
      SCOPED_TRACE(collective.describe());
      const std::vector<Traffic> traffic = run(collective, shape);
      const Cost cost = cost_all_reduce_hierarchical(collective.specs()[0]);
      const std::vector<CountedBytes> links = link_bytes(traffic, nodes);
      // Parts are cut at cache lines; two per chunk and phase may be a line longer than their share.
      const double slack = 0.01 * 4 * kNumel * static_cast<double>(nodes.size());
      for (size_t node = 0; node < nodes.size(); ++node) {
        EXPECT_NEAR(links[node].sent, cost.links.of_nodes[node], slack);
        EXPECT_NEAR(links[node].received, cost.links.of_nodes[node], slack);
      }
      for (const Traffic& rank : traffic) EXPECT_EQ(rank.barriers, cost.barriers);
    }
  }
}

TEST(HierarchicalTest, SharesGiveTheRightBytesInEverySizeAndOrder) {
  for (const char* name : {"all_reduce_hierarchical", "reduce_hierarchical", "all_reduce_hierarchical_one_shot"}) {
    for (const Nodes& nodes : {nodes_of_sizes({1, 1, 1}), nodes_of_sizes({4, 2, 1}), nodes_in_turn(9, 3)}) {
      for (const std::vector<int32_t>& shares : {std::vector<int32_t>{512, 512, 0}, {0, 0, 1024}, {1, 1000, 23}}) {
        for (const int64_t numel : {0, 1, 37, 131, 5003, 15'001}) {
          for (uint64_t seed = 0; seed < 3; ++seed) {
            CollectiveShape shape = shape_of(nodes, numel);
            shape.bank_bytes = seed % 2 == 0 ? 40'000 : 37'000;
            shape.window_bytes = 48 + static_cast<int64_t>(seed * seed * 100);
            shape.is_in_place = seed == 2;
            shape.seed = seed;
            shape.node_shares = shares;
            const SimulatedCollective collective(*find_algorithm(name), shape);
            SCOPED_TRACE(collective.describe());
            run(collective, shape);
          }
        }
      }
    }
  }
}

TEST(HierarchicalTest, RefusesSharesThatAreNoWhole) {
  for (const std::vector<int32_t>& shares : {std::vector<int32_t>{1024}, {1024, 1}, {-1, 1025}, {0, 0}}) {
    CollectiveSpec spec{.op = OpKind::kAllReduce,
                        .world_size = 2,
                        .element_bytes = 4,
                        .bytes = 400,
                        .bank_bytes = 4096,
                        .nodes = {{0}, {1}},
                        .node_shares = shares,
                        .window_bytes = 4096};
    EXPECT_THROW(plan_all_reduce_hierarchical(spec), std::invalid_argument);
    EXPECT_THROW(cost_all_reduce_hierarchical(spec), std::invalid_argument);
  }
}

TEST(HierarchicalTest, BlocksCrossToEachOtherNodeOnce) {
  for (const char* name : {"all_gather_hierarchical", "reduce_scatter_hierarchical"}) {
    for (const Nodes& nodes : many_nodes()) {
      const CollectiveShape shape = shape_of(nodes, 3001);
      const SimulatedCollective collective(*find_algorithm(name), shape);
      SCOPED_TRACE(collective.describe());
      const int64_t block_bytes = collective.specs()[0].bytes;
      const auto between = bytes_between_nodes(run(collective, shape), nodes);
      for (size_t from = 0; from < nodes.size(); ++from) {
        for (size_t to = 0; to < nodes.size(); ++to) {
          const size_t blocks = std::string_view(name) == "all_gather_hierarchical" ? from : to;
          EXPECT_EQ(between[from][to], from == to ? 0 : int64_t(nodes[blocks].size()) * block_bytes);
        }
      }
    }
  }
}

TEST(HierarchicalTest, ReduceBringsTheRootsNodeTwoThirdsOfWhatEveryNodeWouldSend) {
  const Nodes nodes = nodes_of_sizes({2, 2, 2});
  const CollectiveShape shape = shape_of(nodes, kNumel);
  const SimulatedCollective collective(*find_algorithm("reduce_hierarchical"), shape);
  const auto links = link_bytes(run(collective, shape), nodes);
  EXPECT_NEAR(links[2].received, 2 * 2.0 / 3 * 4 * kNumel, 16'384);
}

TEST(HierarchicalTest, BroadcastEntersEveryNodeOnce) {
  for (const char* name : {"broadcast_tree", "broadcast_chain"}) {
    for (const Nodes& nodes : many_nodes()) {
      const CollectiveShape shape = shape_of(nodes, 100'003);
      const SimulatedCollective collective(*find_algorithm(name), shape);
      SCOPED_TRACE(collective.describe());
      int64_t most_sent = 0;
      int32_t entered = 0;
      for (const CountedBytes& link : link_bytes(run(collective, shape), nodes)) {
        EXPECT_TRUE(link.received == 0 || link.received == 100'003);
        entered += link.received > 0;
        most_sent = std::max(most_sent, link.sent);
      }
      EXPECT_EQ(entered, static_cast<int32_t>(nodes.size()) - 1);
      const double formula = find_algorithm(name)->cost(collective.specs()[0]).network_bytes;
      EXPECT_EQ(static_cast<double>(most_sent), formula);
    }
  }
}

TEST(HierarchicalTest, GatherAndScatterSendEachBlockStraightToItsRank) {
  for (const char* name : {"gather_staged", "scatter_staged"}) {
    for (const Nodes& nodes : many_nodes()) {
      const CollectiveShape shape = shape_of(nodes, 1001);
      const SimulatedCollective collective(*find_algorithm(name), shape);
      SCOPED_TRACE(collective.describe());
      int64_t total = 0;
      for (const CountedBytes& link : link_bytes(run(collective, shape), nodes)) total += link.sent;
      EXPECT_EQ(total, static_cast<int64_t>(find_algorithm(name)->cost(collective.specs()[0]).network_bytes));
    }
  }
}

// A process's work is known beforehand: on nodes of equal size, barriers exactly and memory within a tenth.
TEST(HierarchicalTest, CostsWhatItsFormulaSays) {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.op == OpKind::kAllToAll) continue;
    for (const Nodes& nodes : {nodes_of_sizes({2, 2}), nodes_in_turn(8, 2), nodes_of_sizes({1, 1, 1, 1})}) {
      CollectiveShape shape = shape_of(nodes, kNumel);
      shape.bank_bytes = 1 << 14;
      const std::vector<Nodes> served = placements_of(algorithm, shape.world_size);
      if (std::find(served.begin(), served.end(), nodes) == served.end()) continue;
      const SimulatedCollective collective(algorithm, shape);
      SCOPED_TRACE(collective.describe());
      const std::vector<Traffic> traffic = run(collective, shape);
      const Cost cost = algorithm.cost(collective.specs()[0]);
      int64_t memory_bytes = 0;
      for (int32_t rank = 0; rank < shape.world_size; ++rank) {
        EXPECT_EQ(traffic[rank].barriers, cost.barriers);
        EXPECT_EQ(algorithm.cost(collective.specs()[rank]).memory_bytes, cost.memory_bytes);
        memory_bytes = std::max(memory_bytes, traffic[rank].memory_bytes);
      }
      EXPECT_NEAR(memory_bytes, cost.memory_bytes, 0.1 * cost.memory_bytes);
      int64_t most = 0;
      for (const CountedBytes& link : link_bytes(traffic, nodes)) most = std::max({most, link.sent, link.received});
      EXPECT_NEAR(most, cost.network_bytes, 0.05 * cost.network_bytes + 2);
    }
  }
}

// Reductions of chosen values. The SimulatedCollective gives schedules and memory; its own values are replaced.
template <typename T>
struct Values {
  const SimulatedCollective& collective;
  int32_t world_size;

  void put(int32_t rank, const std::vector<T>& values) const {
    std::memcpy(collective.tensors()[rank].inputs[0].data(), values.data(), sizeof(T) * values.size());
  }
  std::vector<T> get(int32_t rank) const {
    const auto bytes = collective.tensors()[rank].outputs[0];
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

TEST(HierarchicalTest, AddsNodesInOrderAndRanksInOrderWithinANode) {
  for (const char* name : {"all_reduce_hierarchical", "all_reduce_hierarchical_one_shot"}) {
    for (const Nodes& nodes : many_nodes()) {
      const CollectiveShape shape = shape_of(nodes, 1537);
      const SimulatedCollective collective(*find_algorithm(name), shape);
      SCOPED_TRACE(collective.describe());
      const Values<float> values{collective, shape.world_size};
      std::mt19937_64 random(5);
      std::normal_distribution<float> normal;
      std::vector<std::vector<float>> inputs(shape.world_size, std::vector<float>(shape.numel));
      for (auto& input : inputs) {
        for (float& value : input) value = normal(random) * std::exp2(static_cast<float>(random() % 20));
      }
      for (int32_t rank = 0; rank < shape.world_size; ++rank) values.put(rank, inputs[rank]);
      std::vector<float> expected(shape.numel);
      for (int64_t i = 0; i < shape.numel; ++i) {
        for (size_t node = 0; node < nodes.size(); ++node) {
          float sum = inputs[nodes[node][0]][i];
          for (size_t local = 1; local < nodes[node].size(); ++local) sum += inputs[nodes[node][local]][i];
          expected[i] = node == 0 ? sum : expected[i] + sum;
        }
      }
      SimulatedOperation operation = collective.operation();
      operation.dtype = DType::kFloat32;
      simulate(simulator_options(shape), {operation});
      for (int32_t rank = 0; rank < shape.world_size; ++rank) EXPECT_EQ(values.get(rank), expected);
    }
  }
}

// The lengths of a torus of nodes, of 5, 3 and 2; of 2 alone, for a part of the nodes, where others would be longer.
std::vector<size_t> rows_of(size_t nodes) {
  std::vector<size_t> rows;
  size_t left = nodes;
  for (const size_t length : {5, 3, 2}) {
    for (; left % length == 0; left /= length) rows.push_back(length);
  }
  return left == 1 ? rows : std::vector<size_t>(std::bit_width(nodes) - 1, 2);
}

void expect_sums_of_rows(std::string_view name) {
  std::vector<Nodes> all = many_nodes();
  all.push_back(nodes_of_sizes({1, 2, 1, 1, 3, 1, 1}));
  for (const size_t nodes : {6, 9, 12, 14, 30}) all.push_back(nodes_of_sizes(std::vector<int32_t>(nodes, 1)));
  for (const Nodes& nodes : all) {
    const CollectiveShape shape = shape_of(nodes, 300);
    const SimulatedCollective collective(*find_algorithm(name), shape);
    SCOPED_TRACE(collective.describe());
    const Values<float> values{collective, shape.world_size};
    std::mt19937_64 random(5);
    std::vector<std::vector<float>> sums(nodes.size(), std::vector<float>(shape.numel));
    for (size_t node = 0; node < nodes.size(); ++node) {
      for (const int32_t rank : nodes[node]) {
        std::vector<float> input(shape.numel);
        for (float& value : input)
          value = std::ldexp(static_cast<float>(random() % 999), static_cast<int>(random() % 20));
        for (int64_t i = 0; i < shape.numel; ++i) sums[node][i] += input[i];
        values.put(rank, input);
      }
    }
    const std::vector<size_t> rows = rows_of(nodes.size());
    const size_t core = std::accumulate(rows.begin(), rows.end(), size_t{1}, std::multiplies<>());
    for (int64_t i = 0; i < shape.numel; ++i) {
      for (size_t node = core; node < nodes.size(); ++node) sums[node - core][i] += sums[node][i];
      for (size_t distance = 1; const size_t length : rows) {
        for (size_t node = 0; node < core; node += distance * length) {
          for (size_t place = 1; place < length; ++place) sums[node][i] += sums[node + place * distance][i];
        }
        distance *= length;
      }
    }
    SimulatedOperation operation = collective.operation();
    operation.dtype = DType::kFloat32;
    simulate(simulator_options(shape), {operation});
    for (int32_t rank = 0; rank < shape.world_size; ++rank) EXPECT_EQ(values.get(rank), sums[0]);
  }
}

TEST(HierarchicalTest, DoublingAddsRowsOfATorusAndGivesAllRanksTheSameBits) {
  expect_sums_of_rows("all_reduce_doubling");
}

TEST(HierarchicalTest, HalvingGivesTheBitsOfDoubling) { expect_sums_of_rows("all_reduce_halving"); }

TEST(HierarchicalTest, MultipliesEveryInputOnceAndDividesOnceAtTheEnd) {
  for (const char* name :
       {"all_reduce_hierarchical", "all_reduce_hierarchical_one_shot", "all_reduce_doubling", "all_reduce_halving"}) {
    for (const Nodes& nodes : {nodes_of_sizes({2, 2}), nodes_of_sizes({1, 1, 2})}) {
      for (const ReduceOp op : {ReduceOp::kPremulSum, ReduceOp::kAverage}) {
        const CollectiveShape shape = shape_of(nodes, 100);
        const SimulatedCollective collective(*find_algorithm(name), shape);
        const Values<float> values{collective, shape.world_size};
        for (int32_t rank = 0; rank < 4; ++rank) values.put(rank, std::vector<float>(100, 1.0F + rank));
        SimulatedOperation operation = collective.operation();
        operation.dtype = DType::kFloat32;
        operation.reduce_op = op;
        operation.factor = op == ReduceOp::kAverage ? 4 : 3;
        simulate(simulator_options(shape), {operation});
        const float expected = op == ReduceOp::kAverage ? 2.5F : 30.0F;
        for (int32_t rank = 0; rank < 4; ++rank) EXPECT_EQ(values.get(rank), std::vector<float>(100, expected));
      }
    }
  }
}

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, 4);
  return value;
}

// A node's partial sum is rounded, and the sum of those: |error| <= u (sum of |partial sums| + |sum|), with u = 2^-8,
// up to terms in u^2, whatever the number of nodes.
TEST(HierarchicalTest, Rounds16BitSumsOncePerNodeAndOnceAtTheEnd) {
  for (const Nodes& nodes :
       {nodes_of_sizes({4, 4}), nodes_of_sizes({1, 1, 1, 1, 1, 1, 1, 1}), nodes_of_sizes({2, 3, 3})}) {
    CollectiveSpec spec{.op = OpKind::kAllReduce,
                        .world_size = 8,
                        .element_bytes = 2,
                        .bytes = 2 * 4000,
                        .bank_bytes = 4096,
                        .nodes = nodes,
                        .window_bytes = 4096};
    std::mt19937_64 random(6);
    std::vector<std::vector<uint16_t>> inputs(8, std::vector<uint16_t>(4000));
    std::vector<std::vector<uint16_t>> outputs = inputs;
    SimulatedOperation operation{.dtype = DType::kBFloat16};
    for (int32_t rank = 0; rank < 8; ++rank) {
      for (uint16_t& value : inputs[rank]) value = static_cast<uint16_t>((random() & 0x80ff) | 0x3f00);  // 0.5 to 2
      spec.rank = rank;
      operation.schedules.push_back(plan_all_reduce_hierarchical(spec));
      operation.tensors.push_back({.inputs = {std::as_writable_bytes(std::span(inputs[rank]))},
                                   .outputs = {std::as_writable_bytes(std::span(outputs[rank]))}});
    }
    simulate({.world_size = 8, .bank_bytes = 4096, .nodes = nodes, .window_bytes = 4096}, {operation});
    for (int64_t i = 0; i < 4000; ++i) {
      double sum = 0;
      double partial_sums = 0;
      for (const auto& node : nodes) {
        double partial = 0;
        for (const int32_t rank : node) partial += from_bfloat16(inputs[rank][i]);
        sum += partial;
        partial_sums += std::abs(partial);
      }
      const double bound = std::exp2(-8) * 1.01 * (partial_sums + std::abs(sum)) + 1e-30;
      EXPECT_LE(std::abs(from_bfloat16(outputs[0][i]) - sum), bound);
    }
    for (int32_t rank = 1; rank < 8; ++rank) EXPECT_EQ(outputs[rank], outputs[0]);
  }
}

TEST(HierarchicalTest, NetworkTimeHidesBehindMemoryTimeAndTheOtherWayRound) {
  const Nodes nodes = nodes_of_sizes({2, 2});
  CollectiveShape shape = shape_of(nodes, 1 << 20);
  shape.bank_bytes = 1 << 20;
  shape.window_bytes = 1 << 20;
  const SimulatedCollective collective(*find_algorithm("all_reduce_hierarchical"), shape);
  SimulatorOptions options = simulator_options(shape);
  const auto time_of = [&](double memory_bytes_per_us, double network_bytes_per_us) {
    options.model = {.barrier_us = 0,
                     .bytes_per_us = memory_bytes_per_us,
                     .hop_us = 0,
                     .network_bytes_per_us = network_bytes_per_us,
                     .message_us = 0};
    double latest = 0;
    for (const Traffic& traffic : simulate(options, {collective.operation()}))
      latest = std::max(latest, traffic.time_us);
    return latest;
  };
  const double memory_us = time_of(10'000, 1e12);
  const double network_us = time_of(1e12, 1'000);
  const double both_us = time_of(10'000, 1'000);
  EXPECT_NEAR(network_us, 4 * (1 << 20) / 1'000.0, 0.2 * network_us);  // the lower bound of two nodes
  EXPECT_LT(both_us, 0.75 * (memory_us + network_us));
  EXPECT_LT(both_us, 1.25 * std::max(memory_us, network_us));
}

TEST(HierarchicalTest, RefusesAPlacementThatIsNotOne) {
  for (const Nodes& nodes : {Nodes{{0, 1}, {1, 2}}, Nodes{{0}, {1}}, Nodes{{0, 1}, {3}}, Nodes{{0, 1}, {-1}}}) {
    const CollectiveSpec spec{.op = OpKind::kAllReduce,
                              .world_size = 3,
                              .element_bytes = 4,
                              .bytes = 400,
                              .bank_bytes = 4096,
                              .nodes = nodes,
                              .window_bytes = 4096};
    EXPECT_THROW(plan_all_reduce_hierarchical(spec), std::invalid_argument);
  }
}

}  // namespace
}  // namespace zeropg

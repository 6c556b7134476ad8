// Algorithms over the domains of one node: right bytes whatever the domains, how many of them cross between domains, in
// which order sums are added, and that they are rounded once. algorithms_test.cpp has no domains.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/select/select.h"
#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

using Domains = Nodes;

// Even, uneven, interleaved, of one rank, many.
const std::vector<Domains>& many_domains() {
  static const std::vector<Domains> all{
      nodes_of_sizes({9, 9}), nodes_of_sizes({5, 6, 7}),  nodes_in_turn(17, 2),         nodes_in_turn(19, 3),
      nodes_in_turn(32, 4),   nodes_of_sizes({16, 1}),    nodes_of_sizes({1, 16}),      nodes_of_sizes({16, 16}),
      nodes_in_turn(24, 12),  nodes_of_sizes({3, 14, 4}), nodes_of_sizes({8, 8, 8, 8}), nodes_in_turn(18, 18),
  };
  return all;
}

int32_t world_size_of(const Domains& domains) {
  int32_t world_size = 0;
  for (const auto& domain : domains) world_size += static_cast<int32_t>(domain.size());
  return world_size;
}

CollectiveShape shape_of(const Domains& domains, int64_t numel) {
  return {.world_size = world_size_of(domains), .numel = numel, .bank_bytes = 8192, .domains = domains};
}

class DomainsTest : public testing::TestWithParam<Algorithm> {
 protected:
  const Algorithm& algorithm() const { return GetParam(); }
  bool has_blocks() const {  // one for each rank, and thus tensors of many times `numel`
    return algorithm().op == OpKind::kReduceScatter || algorithm().op == OpKind::kAllGather;
  }

  void run(const CollectiveShape& shape) const {
    SimulatedCollective collective(algorithm(), shape);
    SCOPED_TRACE(collective.describe());
    simulate(simulator_options(shape), {collective.operation()});
    collective.expect_outputs();
  }
};

TEST_P(DomainsTest, GivesTheRightBytesWhateverTheDomainsAndTheSize) {
  for (const Domains& domains : many_domains()) {
    const int32_t world_size = world_size_of(domains);
    for (const int32_t numel : {0, 1, world_size - 1, world_size, world_size + 1, 777, has_blocks() ? 800 : 8195}) {
      CollectiveShape shape = shape_of(domains, numel);
      shape.root = world_size / 2;
      shape.seed = numel;
      run(shape);
      shape.is_in_place = true;
      shape.bank_bytes = 1024;
      run(shape);
      shape.is_list = true;
      if (has_blocks()) run(shape);
    }
  }
}

TEST_P(DomainsTest, DoesNotDependOnWhoIsFirst) {
  for (const Domains& domains : {nodes_of_sizes({9, 9}), nodes_of_sizes({5, 6, 7}), nodes_in_turn(17, 4)}) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      CollectiveShape shape = shape_of(domains, has_blocks() ? 300 : 3000);
      shape.bank_bytes = 640;
      shape.root = 1;
      shape.seed = seed;
      run(shape);
    }
  }
}

TEST_P(DomainsTest, BeginsWithTheBarrierOfAllRanksAndWritesNoOutputBeforeIt) {
  for (const Domains& domains : many_domains()) {
    for (const int64_t numel : {0, 5, 400}) {
      const SimulatedCollective collective(algorithm(), shape_of(domains, numel));
      for (const Schedule& schedule : collective.unrolled_schedules()) {
        bool has_met = false;
        for (const Step& step : schedule.steps) {
          has_met |= step.kind == StepKind::kBarrier;
          EXPECT_TRUE(has_met || step.destination.space == Space::kStaging);
        }
        EXPECT_TRUE(has_met);
      }
    }
  }
}

// Sizes that all ranks divide. The formula is that of the schedule where domains are even.
TEST_P(DomainsTest, CostsWhatItsFormulaSays) {
  for (const Domains& domains : {nodes_of_sizes({16, 16}), nodes_in_turn(32, 4), nodes_of_sizes({8, 8, 8, 8})}) {
    const CollectiveShape shape = shape_of(domains, has_blocks() ? 1024 : 32 * 512);
    const SimulatedCollective collective(algorithm(), shape);
    SCOPED_TRACE(collective.describe());
    const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
    const Cost cost = algorithm().cost(collective.specs()[0]);
    const Placement placement = Placement::over_domains(collective.specs()[0]);
    int64_t memory_bytes = 0;
    int64_t far_bytes = 0;
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      EXPECT_EQ(traffic[rank].barriers, cost.barriers);
      EXPECT_EQ(algorithm().cost(collective.specs()[rank]).memory_bytes, cost.memory_bytes);
      memory_bytes = std::max(memory_bytes, traffic[rank].memory_bytes);
      int64_t far = 0;
      for (int32_t peer = 0; peer < shape.world_size; ++peer) {
        if (placement.node_of(peer) != placement.node_of(rank)) far += traffic[rank].staged_read_bytes[peer];
      }
      far_bytes = std::max(far_bytes, far);
    }
    EXPECT_NEAR(memory_bytes, cost.memory_bytes, 0.02 * cost.memory_bytes);
    EXPECT_NEAR(far_bytes, cost.far_bytes, 0.05 * cost.far_bytes);
  }
}

// Also those that know no domains: whatever a group chooses has to work beside the others on the same banks.
std::vector<Algorithm> algorithms_of_one_node() {
  std::vector<Algorithm> found;
  for (const Algorithm& algorithm : algorithms()) {
    const CollectiveSpec spec{.op = algorithm.op,
                              .world_size = 18,
                              .bank_bytes = 1 << 20,
                              .mailbox_bytes = 1 << 20,
                              .domains = nodes_of_sizes({9, 9})};
    if (algorithm.supports(spec) && !algorithm.is_direct) found.push_back(algorithm);
  }
  return found;
}

std::vector<Algorithm> algorithms_over_domains() {
  std::vector<Algorithm> found;
  for (const Algorithm& algorithm : algorithms_of_one_node()) {
    if (algorithm.name.ends_with("_domains")) found.push_back(algorithm);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Registry, DomainsTest, testing::ValuesIn(algorithms_over_domains()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DomainsTest, CollectivesOfAllKindsShareTheStagingOfOneGroup) {
  const std::vector<Algorithm> serving = algorithms_of_one_node();
  for (uint64_t seed = 0; seed < 24; ++seed) {
    std::mt19937_64 random(seed);
    CollectiveShape shape = shape_of(many_domains()[seed % many_domains().size()], 0);
    shape.bank_bytes = 2048;
    std::vector<SimulatedCollective> collectives;
    collectives.reserve(10);
    std::vector<SimulatedOperation> operations;
    for (int i = 0; i < 10; ++i) {
      shape.numel = static_cast<int64_t>(random() % (random() % 2 == 0 ? 40 : 700));
      shape.root = static_cast<int32_t>(random() % shape.world_size);
      shape.seed = random();
      const std::vector<Algorithm> choices = random() % 2 == 0 ? serving : algorithms_over_domains();
      collectives.emplace_back(choices[random() % choices.size()], shape);
      operations.push_back(collectives.back().operation());
    }
    simulate(simulator_options(shape), operations);
    for (const SimulatedCollective& collective : collectives) collective.expect_outputs();
  }
}

// [from][to]: what ranks of domain `to` read from slots of domain `from`.
int64_t bytes_between_domains(const std::vector<Traffic>& traffic, const Domains& domains) {
  int64_t bytes = 0;
  for (const auto& readers : domains) {
    for (const auto& owners : domains) {
      if (&readers == &owners) continue;
      for (const int32_t reader : readers) {
        for (const int32_t owner : owners) bytes += traffic[reader].staged_read_bytes[owner];
      }
    }
  }
  return bytes;
}

int64_t bytes_between_domains(std::string_view algorithm, const Domains& domains, int64_t numel) {
  const CollectiveShape shape = shape_of(domains, numel);
  const SimulatedCollective collective(*find_algorithm(algorithm), shape);
  return bytes_between_domains(simulate(simulator_options(shape), {collective.operation()}), domains);
}

TEST(DomainsTest, EveryBlockOfOtherDomainsCrossesOnce) {
  for (const Domains& domains : many_domains()) {
    const int64_t world_size = world_size_of(domains);
    const auto others = static_cast<int64_t>(domains.size()) - 1;
    EXPECT_EQ(bytes_between_domains("reduce_scatter_domains", domains, 301), others * world_size * 4 * 301);
    EXPECT_EQ(bytes_between_domains("all_gather_domains", domains, 601), others * world_size * 601);
    EXPECT_EQ(bytes_between_domains("broadcast_domains", domains, 10'007), others * 10'007);
  }
}

// Each domain's sums have to leave it and the result has to come to it: of D domains D - 1 tensors each way.
TEST(DomainsTest, AllReduceMovesTheLowerBoundBetweenDomains) {
  for (const Domains& domains : many_domains()) {
    const auto others = static_cast<int64_t>(domains.size()) - 1;
    EXPECT_EQ(bytes_between_domains("all_reduce_domains", domains, 7001), 2 * others * 4 * 7001);
  }
}

TEST(DomainsTest, AFlatAllReduceMovesFarMore) {
  EXPECT_NEAR(static_cast<double>(bytes_between_domains("all_reduce_staged", nodes_of_sizes({16, 16}), 1 << 14)),
              2.0 * 16 * 4 * (1 << 14), 4096);
}

// An operation on chosen values of one dtype, by all ranks.
template <class T>
std::vector<std::vector<T>> all_reduce(const Domains& domains, const std::vector<std::vector<T>>& inputs, DType dtype,
                                       ReduceOp op, double factor, int64_t bank_bytes = 4096) {
  const auto world_size = static_cast<int32_t>(inputs.size());
  CollectiveSpec spec{.op = OpKind::kAllReduce,
                      .world_size = world_size,
                      .element_bytes = sizeof(T),
                      .bytes = static_cast<int64_t>(sizeof(T) * inputs[0].size()),
                      .bank_bytes = bank_bytes,
                      .domains = domains,
                      .accumulator_bytes = static_cast<int32_t>(element_bytes(accumulator_dtype(dtype)))};
  std::vector<std::vector<T>> sources = inputs;
  std::vector<std::vector<T>> outputs = inputs;
  SimulatedOperation operation{.dtype = dtype, .reduce_op = op, .factor = factor};
  for (spec.rank = 0; spec.rank < world_size; ++spec.rank) {
    operation.schedules.push_back(plan_all_reduce_domains(spec));
    operation.tensors.push_back({.inputs = {std::as_writable_bytes(std::span(sources[spec.rank]))},
                                 .outputs = {std::as_writable_bytes(std::span(outputs[spec.rank]))}});
  }
  simulate({.world_size = world_size, .bank_bytes = bank_bytes, .seed = 3}, {operation});
  return outputs;
}

TEST(DomainsTest, AddsDomainsInOrderAndRanksInOrderWithinADomain) {
  for (const Domains& domains : many_domains()) {
    const int32_t world_size = world_size_of(domains);
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> inputs(world_size, std::vector<float>(1537));
    for (auto& input : inputs) {
      for (float& value : input) value = normal(random) * std::exp2(static_cast<float>(random() % 20));
    }
    std::vector<float> expected(1537);
    for (size_t i = 0; i < expected.size(); ++i) {
      for (size_t domain = 0; domain < domains.size(); ++domain) {
        float sum = inputs[domains[domain][0]][i];
        for (size_t local = 1; local < domains[domain].size(); ++local) sum += inputs[domains[domain][local]][i];
        expected[i] = domain == 0 ? sum : expected[i] + sum;
      }
    }
    for (const auto& output : all_reduce(domains, inputs, DType::kFloat32, ReduceOp::kSum, 1)) {
      EXPECT_EQ(output, expected);
    }
  }
}

TEST(DomainsTest, MultipliesEveryInputOnceAndDividesOnceAtTheEnd) {
  const Domains domains = nodes_of_sizes({7, 10});
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < 17; ++rank) inputs.emplace_back(100, 1.0F + rank);
  EXPECT_EQ(all_reduce(domains, inputs, DType::kFloat32, ReduceOp::kAverage, 17)[3], std::vector<float>(100, 9));
  EXPECT_EQ(all_reduce(domains, inputs, DType::kFloat32, ReduceOp::kPremulSum, 3)[4], std::vector<float>(100, 459));
}

// Every rank adds 3/8 of the last bit of what rank 0 adds; partial sums that were rounded would lose them.
TEST(DomainsTest, Rounds16BitSumsOnceForAllDomains) {
  for (const Domains& domains : many_domains()) {
    const int32_t world_size = world_size_of(domains);
    std::vector<std::vector<uint16_t>> inputs(world_size, std::vector<uint16_t>(1003, 0x3b40));  // 3 * 2^-10
    inputs[0].assign(1003, 0x3f80);                                                              // 1
    const double sum = 1 + (world_size - 1) * 3 * std::exp2(-10);  // exact in fp32; bf16 has 7 bits behind the point
    const auto expected = static_cast<uint16_t>(0x3f80 + std::nearbyint((sum - 1) * 128));
    for (const int64_t bank_bytes : {4096, 1024}) {  // of the smaller ones pieces are cut between cache lines
      for (const auto& output : all_reduce(domains, inputs, DType::kBFloat16, ReduceOp::kSum, 1, bank_bytes)) {
        EXPECT_EQ(output, std::vector<uint16_t>(1003, expected)) << world_size;
      }
    }
  }
}

CollectiveSpec all_reduce_spec(int32_t world_size, int64_t bytes, const Domains& domains) {
  return {.op = OpKind::kAllReduce,
          .world_size = world_size,
          .element_bytes = 4,
          .bytes = bytes,
          .bank_bytes = 1 << 20,
          .mailbox_bytes = 1 << 18,
          .domains = domains};
}

TEST(DomainsTest, LargeTensorsOfManyRanksGoOverDomainsAndSmallOnesDoNot) {
  for (const Domains& domains : {nodes_of_sizes({16, 16}), nodes_in_turn(64, 8), nodes_of_sizes({12, 12})}) {
    CollectiveSpec spec = all_reduce_spec(world_size_of(domains), 64, domains);
    EXPECT_EQ(select_algorithm(spec).name, "all_reduce_one_shot");
    spec.bytes = 16 << 20;
    for (spec.rank = 0; spec.rank < spec.world_size; ++spec.rank) {
      EXPECT_EQ(select_algorithm(spec).name, "all_reduce_domains");
    }
    spec.domains.clear();
    EXPECT_EQ(select_algorithm(spec).name, "all_reduce_staged");
  }
}

TEST(DomainsTest, LargeBlocksGoOverDomainsTooUnlessTheyLieInSharedMemory) {
  for (const OpKind op : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast}) {
    CollectiveSpec spec = all_reduce_spec(32, 4 << 20, nodes_of_sizes({16, 16}));
    spec.op = op;
    EXPECT_EQ(select_algorithm(spec).name, std::string(traits_of(op).name) + "_domains");
    EXPECT_NE(select_direct_algorithm(spec), nullptr);
    spec.bytes = 4;
    EXPECT_EQ(select_algorithm(spec).name, std::string(traits_of(op).name) + "_staged");
  }
}

TEST(DomainsTest, SixteenRanksOneDomainOrSeveralNodesHaveNoUseForThem) {
  const auto supports = find_algorithm("all_reduce_domains")->supports;
  EXPECT_TRUE(supports(all_reduce_spec(17, 400, nodes_in_turn(17, 2))));
  EXPECT_FALSE(supports(all_reduce_spec(16, 400, nodes_in_turn(16, 2))));
  EXPECT_FALSE(supports(all_reduce_spec(17, 400, {})));
  EXPECT_FALSE(supports(all_reduce_spec(17, 400, nodes_in_turn(17, 1))));
  CollectiveSpec spec = all_reduce_spec(17, 400, nodes_in_turn(17, 2));
  spec.nodes = nodes_in_turn(17, 2);
  EXPECT_FALSE(supports(spec));
  spec.nodes.clear();
  spec.bank_bytes = 64;
  EXPECT_FALSE(supports(spec));
}

TEST(DomainsTest, AForcedAlgorithmThatTheGroupCannotUseIsAnErrorThatSaysWhatThereIs) {
  try {
    select_algorithm(all_reduce_spec(17, 400, {}), "all_reduce_domains");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("all_reduce_domains does not support world_size 17 on 1 nodes and 1 domains"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace zeropg

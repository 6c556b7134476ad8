#include "backend/collectives/select/select.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <set>
#include <stdexcept>
#include <string>

namespace zeropg {
namespace {

void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
}

CollectiveSpec all_reduce(int32_t world_size, int64_t bytes) {
  return {.op = OpKind::kAllReduce,
          .world_size = world_size,
          .element_bytes = 4,
          .bytes = bytes,
          .bank_bytes = 1 << 18,
          .mailbox_bytes = 1 << 16,
          .send_bytes = {},
          .receive_bytes = {}};
}

std::string message_of(const CollectiveSpec& spec, std::string_view forced) {
  try {
    select_algorithm(spec, forced);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(RegistryTest, NamesAreUniqueStartWithTheirOperationAndAreFound) {
  std::set<std::string_view> names;
  for (const Algorithm& algorithm : algorithms()) {
    EXPECT_TRUE(names.insert(algorithm.name).second) << algorithm.name;
    EXPECT_TRUE(algorithm.name.starts_with(traits_of(algorithm.op).name));
    EXPECT_EQ(find_algorithm(algorithm.name)->name, algorithm.name);
  }
  EXPECT_EQ(find_algorithm("all_reduce"), nullptr);
}

TEST(SelectTest, EveryOperationHasAnAlgorithm) {
  for (size_t op = 0; op < kOpKindCount; ++op) {
    CollectiveSpec spec = all_reduce(4, 64);
    spec.op = static_cast<OpKind>(op);
    EXPECT_EQ(select_algorithm(spec).op, spec.op);
  }
}

TEST(SelectTest, SmallTensorsTakeFewBarriersAndLargeOnesFewBytes) {
  for (const int32_t world_size : {2, 4, 8, 17}) {
    EXPECT_EQ(select_algorithm(all_reduce(world_size, 8)).name, "all_reduce_one_shot");
    EXPECT_EQ(select_algorithm(all_reduce(world_size, 64 << 20)).name, "all_reduce_staged");
  }
}

TEST(SelectTest, DearBarriersMoveTheBorder) {
  const CollectiveSpec spec = all_reduce(4, 64 << 10);
  EXPECT_EQ(select_algorithm(spec, {}, {.barrier_us = 0.1}).name, "all_reduce_staged");
  EXPECT_EQ(select_algorithm(spec, {}, {.barrier_us = 1000}).name, "all_reduce_one_shot");
}

TEST(SelectTest, EveryRankChoosesTheSame) {
  CollectiveSpec spec = all_reduce(8, 20'000);
  const std::string_view name = select_algorithm(spec).name;
  for (spec.rank = 0; spec.rank < 8; ++spec.rank) EXPECT_EQ(select_algorithm(spec).name, name);
}

CollectiveSpec over_nodes(int64_t bytes, int32_t node_count) {
  CollectiveSpec spec = all_reduce(2 * node_count, bytes);
  for (int32_t node = 0; node < node_count; ++node) spec.nodes.push_back({2 * node, 2 * node + 1});
  spec.window_bytes = 1 << 20;
  return spec;
}

TEST(SelectTest, EveryOperationHasAnAlgorithmOverNodes) {
  for (size_t op = 0; op < kOpKindCount; ++op) {
    CollectiveSpec spec = over_nodes(64, 2);
    spec.op = static_cast<OpKind>(op);
    EXPECT_EQ(select_algorithm(spec).op, spec.op);
  }
}

TEST(SelectTest, BetweenNodesSmallTensorsTakeFewHopsAndLargeOnesFewBytes) {
  for (const int32_t nodes : {3, 4, 8}) {
    EXPECT_EQ(select_algorithm(over_nodes(8, nodes)).name,
              nodes < 8 ? "all_reduce_hierarchical_one_shot" : "all_reduce_doubling");
    EXPECT_EQ(select_algorithm(over_nodes(64 << 20, nodes)).name, "all_reduce_hierarchical");
    CollectiveSpec broadcast = over_nodes(8, nodes);
    broadcast.op = OpKind::kBroadcast;
    // Three nodes are two hops from end to end either way, and the chain's root sends one copy instead of two.
    EXPECT_EQ(select_algorithm(broadcast).name, nodes == 3 ? "broadcast_chain" : "broadcast_tree");
    broadcast.bytes = 64 << 20;
    EXPECT_EQ(select_algorithm(broadcast).name, "broadcast_chain");
  }
}

// Each message to each other node costs the processor more than one after the other costs hops.
TEST(SelectTest, SmallTensorsOverManyNodesTakeFewMessages) {
  CollectiveSpec spec = over_nodes(8, 64);
  EXPECT_EQ(select_algorithm(spec).name, "all_reduce_doubling");
  EXPECT_EQ(select_algorithm(spec, {}, {.message_us = 0.1}).name, "all_reduce_hierarchical_one_shot");
  spec.element_bytes = 2;
  spec.accumulator_bytes = 4;
  EXPECT_NE(select_algorithm(spec).name, "all_reduce_doubling");  // would round 16-bit floats in every round
  EXPECT_EQ(select_algorithm(over_nodes(1 << 20, 64)).name, "all_reduce_halving");
  EXPECT_EQ(select_algorithm(over_nodes(256 << 10, 4)).name, "all_reduce_halving");
  EXPECT_EQ(select_algorithm(over_nodes(64 << 20, 64)).name, "all_reduce_hierarchical");
}

TEST(SelectTest, AnAlgorithmOfOneNodeIsRefusedOverNodesAndTheOtherWayRound) {
  expect_words(message_of(over_nodes(8, 2), "all_reduce_staged"),
               {"all_reduce_staged does not support world_size 4 on 2 nodes", "force another one, or none"});
  expect_words(message_of(all_reduce(4, 8), "all_reduce_hierarchical"),
               {"all_reduce_hierarchical does not support world_size 4 on 1 nodes"});
}

TEST(SelectTest, NoWindowBetweenNodesIsAnError) {
  CollectiveSpec spec = over_nodes(8, 2);
  spec.window_bytes = 0;
  expect_words(message_of(spec, ""), {"all_reduce does not support", "windows between nodes of 0 bytes"});
}

TEST(SelectTest, DirectAlgorithmsAreChosenApart) {
  for (const Algorithm& algorithm : algorithms()) {
    if (!algorithm.is_direct || !algorithm.beside.empty()) continue;  // those over nodes: racks_test.cpp
    CollectiveSpec spec = all_reduce(2, 64 << 20);
    spec.op = algorithm.op;
    spec.send_bytes = spec.receive_bytes = {1 << 20, 1 << 20};
    EXPECT_FALSE(select_algorithm(spec).is_direct);
    EXPECT_FALSE(select_algorithm(spec, algorithm.name).is_direct);
    EXPECT_EQ(select_direct_algorithm(spec)->name, algorithm.name);
    EXPECT_EQ(select_direct_algorithm(spec, algorithm.name, {.barrier_us = 1e9})->name, algorithm.name);
    EXPECT_EQ(select_direct_algorithm(spec, select_algorithm(spec).name), nullptr);
    EXPECT_NE(select_direct_algorithm(spec, "barrier"), nullptr);
    spec.bytes = 64;
    EXPECT_EQ(select_direct_algorithm(spec, {}, {.barrier_us = 1e9}), nullptr);  // one barrier is cheaper than two
    spec.nodes = {{0}, {1}};
    EXPECT_EQ(select_direct_algorithm(spec, algorithm.name), nullptr);
  }
}

TEST(SelectTest, ANodesOneOutputIsChosenWhereItIsOfferedAndNoAlgorithmIsForced) {
  CollectiveSpec spec = over_nodes(1 << 20, 2);
  spec.op = OpKind::kAllGather;
  EXPECT_EQ(select_direct_algorithm(spec), nullptr);
  spec.has_node_output = true;
  EXPECT_EQ(select_direct_algorithm(spec)->name, "all_gather_per_node");
  EXPECT_EQ(select_algorithm(spec).name, "all_gather_hierarchical");
  EXPECT_EQ(select_direct_algorithm(spec, "all_gather_hierarchical"), nullptr);
  spec.nodes = {};
  EXPECT_NE(select_direct_algorithm(spec)->name, "all_gather_per_node");
}

TEST(SelectTest, AForcedNameHoldsForItsOperationOnly) {
  EXPECT_EQ(select_algorithm(all_reduce(4, 8), "all_reduce_staged").name, "all_reduce_staged");
  EXPECT_EQ(select_algorithm(all_reduce(4, 8), "broadcast_staged").name, "all_reduce_one_shot");
}

TEST(SelectTest, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  expect_words(message_of(all_reduce(4, 8), "all_reduce_rign"),
               {"unknown collective algorithm 'all_reduce_rign'", "all_reduce_staged, ", "barrier"});
}

TEST(SelectTest, ABankThatCannotServeTheWorldIsAnError) {
  CollectiveSpec spec = all_reduce(17, 8);
  spec.bank_bytes = 64;  // 16 elements
  EXPECT_EQ(select_algorithm(spec).name, "all_reduce_one_shot");
  expect_words(message_of(spec, "all_reduce_staged"), {"all_reduce_staged does not support world_size 17", "64 bytes"});
  EXPECT_THROW(find_algorithm("all_reduce_staged")->plan(spec), std::invalid_argument);
  spec.bank_bytes = 0;
  expect_words(message_of(spec, ""), {"all_reduce does not support"});
}

TEST(SelectTest, AGroupOfOneNeedsNoStaging) {
  CollectiveSpec spec = all_reduce(1, 8);
  spec.bank_bytes = 0;
  EXPECT_EQ(find_algorithm(select_algorithm(spec).name)->plan(spec).steps.size(), 1);
}

}  // namespace
}  // namespace zeropg

// Every registered algorithm, in the simulator and as data. A new algorithm is tested by its line in the registry.
#include "backend/collectives/schedule/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "backend/collectives/schedule/steps.h"
#include "backend/collectives/select/select.h"
#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

constexpr int32_t kLargestWorld = 17;

class AlgorithmTest : public testing::TestWithParam<Algorithm> {
 protected:
  const Algorithm& algorithm() const { return GetParam(); }

  std::vector<Traffic> run(const CollectiveShape& shape) const {
    SimulatedCollective collective(algorithm(), shape);
    SCOPED_TRACE(collective.describe());
    const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
    collective.expect_outputs();
    return traffic;
  }
};

// Around the world size, odd, around one chunk, and several chunks with a rest.
std::set<int64_t> numels(int32_t world_size, int64_t bank_bytes) {
  return {0, 1, world_size - 1, world_size, world_size + 1, 37, 64, bank_bytes / 4 - 1, bank_bytes / 4, bank_bytes + 3};
}

TEST_P(AlgorithmTest, GivesTheRightBytesInEveryWorldAndSize) {
  for (int32_t world_size = 1; world_size <= kLargestWorld; ++world_size) {
    for (const Nodes& nodes : placements_of(algorithm(), world_size)) {
      for (const int64_t numel : numels(world_size, 512)) {
        run({.world_size = world_size,
             .numel = numel,
             .root = world_size / 2,
             .bank_bytes = 512,
             .seed = 1,
             .nodes = nodes});
      }
    }
  }
}

TEST_P(AlgorithmTest, TakesListsAndWorksInPlace) {
  for (int32_t world_size = 1; world_size <= kLargestWorld; world_size += 2) {
    for (const Nodes& nodes : placements_of(algorithm(), world_size)) {
      for (const int64_t numel : {0, 1, 37, 300}) {
        for (const int variant : {1, 2, 3}) {
          if ((variant & 1) != 0 && !takes_lists(algorithm())) continue;
          run({.world_size = world_size,
               .numel = numel,
               .root = world_size - 1,
               .bank_bytes = 256 * 4,
               .is_list = (variant & 1) != 0,
               .is_in_place = (variant & 2) != 0,
               .seed = 2,
               .nodes = nodes});
        }
      }
    }
  }
}

TEST_P(AlgorithmTest, ServesEveryRoot) {
  if (!has_root(algorithm().op)) return;
  for (int32_t world_size = 1; world_size <= kLargestWorld; ++world_size) {
    for (const Nodes& nodes : placements_of(algorithm(), world_size)) {
      for (int32_t root = 0; root < world_size; ++root) {
        run({.world_size = world_size, .numel = 333, .root = root, .bank_bytes = 512, .seed = 3, .nodes = nodes});
      }
    }
  }
}

TEST_P(AlgorithmTest, DoesNotDependOnWhoIsFirst) {
  for (uint64_t seed = 10; seed < 30; ++seed) {
    for (const int32_t world_size : {2, 3, 4, 8}) {
      for (const Nodes& nodes : placements_of(algorithm(), world_size)) {
        run({.world_size = world_size,
             .numel = 1001,
             .root = 1,
             .bank_bytes = 512,
             .mailbox_bytes = 13,
             .seed = seed,
             .nodes = nodes,
             .window_bytes = 48 + static_cast<int64_t>(seed * seed)});
      }
    }
  }
}

TEST_P(AlgorithmTest, UsesBanksSmallerThanACacheLinePerRank) {
  for (const Nodes& nodes : placements_of(algorithm(), 17)) {
    run({.world_size = 17, .numel = 100, .bank_bytes = 68, .mailbox_bytes = 1, .seed = 4, .nodes = nodes});
  }
}

// Three elements: the partial sums of two chunks and a completed slice.
TEST_P(AlgorithmTest, RunsWithTheSmallestWindow) {
  for (const int32_t world_size : {2, 3, 6}) {
    for (const Nodes& nodes : placements_of(algorithm(), world_size)) {
      for (uint64_t seed = 40; seed < 44; ++seed) {
        run({.world_size = world_size,
             .numel = 97,
             .root = 1,
             .bank_bytes = 128,
             .mailbox_bytes = 1,
             .seed = seed,
             .nodes = nodes,
             .window_bytes = is_reduction(algorithm().op) ? 12 : 3});
      }
    }
  }
}

TEST_P(AlgorithmTest, WritesEveryOutputByteOnceAndNoneBeforeTheRanksHaveMet) {
  for (const int32_t world_size : {1, 2, 3, 8, 17}) {
    const std::vector<Nodes> served = placements_of(algorithm(), world_size);
    if (served.empty()) continue;  // one rank is not several nodes
    for (const int64_t numel : {0, 1, 37, 2000}) {
      const CollectiveShape shape{.world_size = world_size,
                                  .numel = numel,
                                  .bank_bytes = 1024,
                                  .is_list = takes_lists(algorithm()),
                                  .nodes = served.back()};
      const SimulatedCollective collective(algorithm(), shape);
      SCOPED_TRACE(collective.describe());
      std::vector<std::vector<std::vector<int>>> writes(world_size);  // [rank][output][byte]
      for (int32_t rank = 0; rank < world_size; ++rank) {
        for (const auto& output : collective.tensors()[rank].outputs) writes[rank].emplace_back(output.size(), 0);
      }
      for (int32_t rank = 0; rank < world_size; ++rank) {
        const Schedule schedule = unrolled(collective.schedules()[rank]);
        bool has_met = world_size == 1;
        const auto count = [&](const Region& region, int64_t bytes) {
          const bool is_peer = region.space == Space::kPeerOutput;
          if (region.space != Space::kOutput && !is_peer) return;
          EXPECT_TRUE(has_met);
          EXPECT_GT(bytes, 0);
          auto& tensor = is_peer ? writes.at(region.index).at(0) : writes[rank].at(region.index);
          for (int64_t i = 0; i < bytes; ++i) ++tensor.at(region.offset_bytes + i);
        };
        for (const Step& step : schedule.steps) {
          has_met |= step.kind == StepKind::kBarrier;
          EXPECT_TRUE(has_met || step.kind != StepKind::kSend);
          // A header alone, which the simulation allows between nodes only, is no write.
          if (step.kind != StepKind::kReceive || step.bytes > 0) count(step.destination, step.bytes);
          for (int32_t i = 0; i < step.echo_count; ++i) count(schedule.echoes.at(step.first_echo + i), step.bytes);
        }
        EXPECT_TRUE(has_met);
      }
      for (int32_t rank = 0; rank < world_size; ++rank) {
        const OpKind op = algorithm().op;
        const bool only_root_writes = op == OpKind::kReduce || op == OpKind::kGather;
        const bool is_shared = op == OpKind::kBroadcast && rank == 0;
        const bool is_of_node =
            makes_node_outputs(algorithm()) && first_of_node(collective.specs()[rank], rank) != rank;
        const int wanted = (only_root_writes && rank != 0) || is_shared || is_of_node ? 0 : 1;
        // Note [Alone on a node]: partial sums lie there first, so bytes may be written again.
        const bool makes_sums_there = op == OpKind::kAllReduce && shape.nodes.size() == static_cast<size_t>(world_size);
        for (const auto& tensor : writes[rank]) {
          const auto is_right = [&](int times) { return makes_sums_there ? times >= wanted : times == wanted; };
          EXPECT_TRUE(std::all_of(tensor.begin(), tensor.end(), is_right));
        }
      }
    }
  }
}

// Before it others may not be there yet, after it nobody may still read.
TEST_P(AlgorithmTest, BeginsAndEndsWithABarrierWhereTensorsAreShared) {
  if (!algorithm().is_direct) return;
  for (const int32_t world_size : {2, 5}) {
    const Nodes nodes = placements_of(algorithm(), world_size).front();
    const SimulatedCollective collective(algorithm(), {.world_size = world_size, .numel = 100, .nodes = nodes});
    for (const Schedule& schedule : collective.unrolled_schedules()) {
      EXPECT_TRUE(schedule.is_direct);
      EXPECT_EQ(schedule.banks_used, 0);
      EXPECT_EQ(schedule.steps.front().kind, StepKind::kBarrier);
      EXPECT_EQ(schedule.steps.back().kind, StepKind::kBarrier);
      EXPECT_GT(schedule.steps.size(), 1);
    }
  }
}

TEST_P(AlgorithmTest, MeetsEquallyOftenOnEveryRankAndKeepsToCacheLines) {
  const CollectiveShape shape{
      .world_size = 5, .numel = 5000, .root = 2, .bank_bytes = 1024, .nodes = placements_of(algorithm(), 5).back()};
  const SimulatedCollective collective(algorithm(), shape);
  std::set<int64_t> barriers;
  for (const Schedule& schedule : collective.unrolled_schedules()) {
    EXPECT_EQ(schedule.algorithm, algorithm().name);
    barriers.insert(std::count_if(schedule.steps.begin(), schedule.steps.end(),
                                  [](const Step& step) { return step.kind == StepKind::kBarrier; }));
    for (const Step& step : schedule.steps) {
      if (step.destination.space == Space::kStaging) {
        EXPECT_EQ(step.destination.offset_bytes % kCacheLineBytes, 0);
      }
    }
  }
  EXPECT_EQ(barriers.size(), 1);
}

// Floating-point sums are the same on every rank and run because sources come in rank order.
TEST_P(AlgorithmTest, ReducesInRankOrder) {
  if (!placements_of(algorithm(), 2)[0].empty()) return;  // between nodes: hierarchical_test.cpp
  for (const int32_t world_size : {2, 5}) {
    const SimulatedCollective collective(algorithm(), {.world_size = world_size, .numel = 3000, .root = 1});
    for (int32_t rank = 0; rank < world_size; ++rank) {
      const Schedule schedule = unrolled(collective.schedules()[rank]);
      for (const Step& step : schedule.steps) {
        if (step.kind != StepKind::kReduce) continue;
        EXPECT_TRUE(step.is_final);
        ASSERT_EQ(step.source_count, world_size);
        for (int32_t i = 0; i < world_size; ++i) {
          const Region& source = schedule.sources.at(step.first_source + i);
          const bool is_of_peer = source.space == Space::kStaging || source.space == Space::kPeerInput;
          EXPECT_EQ(is_of_peer ? source.index : rank, i);
        }
      }
    }
  }
}

// The formulas that algorithms are chosen by are those of the schedules. Sizes that all shares divide.
TEST_P(AlgorithmTest, CostsWhatItsFormulaSays) {
  if (algorithm().op == OpKind::kAllToAll) return;  // its counts differ between ranks
  for (const int32_t world_size : {2, 4, 8}) {
    if (!placements_of(algorithm(), world_size)[0].empty()) continue;  // between nodes: hierarchical_test.cpp
    const CollectiveShape shape{.world_size = world_size, .numel = 4096, .bank_bytes = 4096};
    const SimulatedCollective collective(algorithm(), shape);
    const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
    const Cost cost = algorithm().cost(collective.specs()[0]);
    int64_t memory_bytes = 0;
    for (int32_t rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(traffic[rank].barriers, cost.barriers);
      memory_bytes = std::max(memory_bytes, traffic[rank].memory_bytes);
      const Cost same = algorithm().cost(collective.specs()[rank]);
      EXPECT_EQ(same.memory_bytes, cost.memory_bytes);
    }
    EXPECT_NEAR(memory_bytes, cost.memory_bytes, 0.02 * cost.memory_bytes) << collective.describe();
  }
}

// Those with a codec are tested in compressed_test.cpp: their results are not exact.
std::vector<Algorithm> exact_algorithms() {
  std::vector<Algorithm> exact;
  for (const Algorithm& algorithm : algorithms()) {
    if (!placements_of(algorithm, 4).empty()) exact.push_back(algorithm);
  }
  return exact;
}

INSTANTIATE_TEST_SUITE_P(Registry, AlgorithmTest, testing::ValuesIn(exact_algorithms()),
                         [](const auto& info) { return std::string(info.param.name); });

// Every source byte counts exactly once: rank r contributes bit r, and twice a bit is another bit.
TEST(AllReduceTest, ReducesEverySourceByteOnce) {
  for (const char* name : {"all_reduce_one_shot", "all_reduce_staged"}) {
    for (const int32_t world_size : {2, 3, 17}) {
      const CollectiveShape shape{.world_size = world_size, .numel = 1500, .bank_bytes = 2048};
      const SimulatedCollective collective(*find_algorithm(name), shape);
      for (int32_t rank = 0; rank < world_size; ++rank) {
        const std::vector<int32_t> bits(shape.numel, 1 << rank);
        std::memcpy(collective.tensors()[rank].inputs[0].data(), bits.data(), 4 * bits.size());
      }
      const std::vector<Traffic> traffic = simulate(simulator_options(shape), {collective.operation()});
      const std::vector<int32_t> all(shape.numel, (1 << world_size) - 1);
      int64_t reduced_bytes = 0;
      for (int32_t rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(std::memcmp(collective.tensors()[rank].outputs[0].data(), all.data(), 4 * all.size()), 0);
        reduced_bytes += traffic[rank].reduced_bytes;
      }
      // One shot: everybody reduces everything. Staged: all together reduce every input once, the least there is.
      const int64_t least = world_size * 4 * shape.numel;
      EXPECT_EQ(reduced_bytes, std::string_view(name) == "all_reduce_staged" ? least : world_size * least);
    }
  }
}

// 2 * bytes per rank (read each input once, write each output once) is the lower bound, which needs tensors in shared
// memory. Through staging it is 4 - 2 / world_size more: copy in, and the reduced share's write and read.
TEST(AllReduceTest, StagedMovesFewBytesWhateverTheWorld) {
  for (const int32_t world_size : {2, 4, 8, 16}) {
    const CollectiveShape shape{.world_size = world_size, .numel = 1 << 14, .bank_bytes = 4096};
    const SimulatedCollective collective(*find_algorithm("all_reduce_staged"), shape);
    for (const Traffic& traffic : simulate(simulator_options(shape), {collective.operation()})) {
      EXPECT_LE(traffic.memory_bytes, 5 * 4 * shape.numel);
      EXPECT_GE(traffic.memory_bytes, 2 * 4 * shape.numel);
    }
  }
}

TEST(AllReduceTest, DirectMovesTheLeastBytes) {
  for (const int32_t world_size : {2, 4, 8}) {
    const CollectiveShape shape{.world_size = world_size, .numel = 1 << 12};
    const SimulatedCollective collective(*find_algorithm("all_reduce_direct"), shape);
    for (const Traffic& traffic : simulate(simulator_options(shape), {collective.operation()})) {
      EXPECT_EQ(traffic.memory_bytes, 2 * 4 * shape.numel);
      EXPECT_EQ(traffic.copied_bytes, 0);
    }
  }
}

TEST(AllToAllTest, StagesBeforeItsOnlyBarrierAndFitsTheMailboxes) {
  const SimulatedCollective collective(*find_algorithm("all_to_all_pairwise"),
                                       {.world_size = 5, .numel = 3000, .seed = 5});
  for (const Schedule& schedule : collective.unrolled_schedules()) {
    bool has_met = false;
    for (const Step& step : schedule.steps) {
      if (step.kind == StepKind::kBarrier) {
        EXPECT_FALSE(has_met);
        has_met = true;
      } else if (!has_met) {
        EXPECT_EQ(step.kind, StepKind::kCopy);
        EXPECT_EQ(step.destination.space, Space::kStaging);
      } else if (step.kind == StepKind::kSend) {
        EXPECT_LE(step.bytes, 64);
      }
    }
    EXPECT_TRUE(has_met);
  }
}

TEST(AllToAllTest, SendsNothingThatASlotCanTake) {
  CollectiveSpec spec{.op = OpKind::kAllToAll,
                      .rank = 1,
                      .world_size = 3,
                      .bank_bytes = 4096,
                      .mailbox_bytes = 64,
                      .send_bytes = {2048, 7, 2048},
                      .receive_bytes = {5, 7, 2048}};
  const auto count = [&](StepKind kind) {
    const Schedule schedule = unrolled(plan_all_to_all_pairwise(spec));
    return std::count_if(schedule.steps.begin(), schedule.steps.end(),
                         [&](const Step& step) { return step.kind == kind; });
  };
  EXPECT_EQ(count(StepKind::kSend), 0);
  EXPECT_EQ(count(StepKind::kReceive), 0);
  spec.send_bytes[0] = 2049;
  EXPECT_EQ(count(StepKind::kSend), 1);
}

TEST(AllToAllTest, HearsFromEverybodyWhoseCountsAreNotAnnounced) {
  CollectiveSpec spec{.op = OpKind::kAllToAll, .bank_bytes = 4096, .mailbox_bytes = 4096};
  for (const int32_t world_size : {kMostAnnouncedBlocks, kMostAnnouncedBlocks + 1}) {
    spec.world_size = world_size;
    spec.send_bytes.assign(world_size, 0);
    spec.receive_bytes.assign(world_size, 0);
    std::vector<int32_t> sent(world_size);
    std::vector<int32_t> received(world_size);
    const Schedule schedule = unrolled(plan_all_to_all_pairwise(spec));
    for (const Step& step : schedule.steps) {
      if (step.kind == StepKind::kSend) ++sent[step.peer];
      if (step.kind == StepKind::kReceive) ++received[step.peer];
    }
    std::vector<int32_t> expected(world_size, announces_blocks(spec) ? 0 : 1);
    expected[spec.rank] = 0;
    EXPECT_EQ(sent, expected);
    EXPECT_EQ(received, expected);
  }
}

TEST(AllToAllTest, RefusesCountsThatDoNotFitTheWorld) {
  CollectiveSpec spec{
      .op = OpKind::kAllToAll, .world_size = 2, .mailbox_bytes = 64, .send_bytes = {1}, .receive_bytes = {1, 2}};
  EXPECT_THROW(plan_all_to_all_pairwise(spec), std::invalid_argument);
  spec.send_bytes = {2, 2};
  EXPECT_THROW(plan_all_to_all_pairwise(spec), std::invalid_argument);
}

TEST(BackToBackTest, RandomCollectivesShareTheStagingOfOneGroup) {
  for (int32_t world_size = 1; world_size <= kLargestWorld; ++world_size) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      std::mt19937_64 random(100 * world_size + seed);
      const std::vector<Nodes> all = placements(world_size);
      CollectiveShape shape{.world_size = world_size,
                            .bank_bytes = 1024,
                            .mailbox_bytes = 48,
                            .nodes = all[random() % all.size()],
                            .window_bytes = 64};
      std::vector<Algorithm> serving;
      for (const Algorithm& algorithm : algorithms()) {
        const std::vector<Nodes> served = placements_of(algorithm, world_size);
        if (std::find(served.begin(), served.end(), shape.nodes) != served.end()) serving.push_back(algorithm);
      }
      std::vector<SimulatedCollective> collectives;
      collectives.reserve(12);
      std::vector<SimulatedOperation> operations;
      for (int i = 0; i < 12; ++i) {
        shape.numel = static_cast<int64_t>(random() % (random() % 2 == 0 ? 40 : 900));
        shape.root = static_cast<int32_t>(random() % world_size);
        shape.is_in_place = random() % 2 == 0;
        shape.seed = random();
        const Algorithm& algorithm = serving[random() % serving.size()];
        shape.is_list = random() % 2 == 0 && takes_lists(algorithm);
        collectives.emplace_back(algorithm, shape);
        operations.push_back(collectives.back().operation());
      }
      simulate(simulator_options(shape), operations);
      for (const SimulatedCollective& collective : collectives) collective.expect_outputs();
    }
  }
}

}  // namespace
}  // namespace zeropg

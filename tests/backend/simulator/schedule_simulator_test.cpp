// The simulator finds each kind of fault in small schedules that are written down here, and says where it is.
#include "backend/simulator/schedule_simulator.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <initializer_list>
#include <string>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {
namespace {

void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
}

constexpr int64_t kBytes = 64;

// A group of `world_size` ranks with an input and an output of kBytes each.
class GroupContext {
 public:
  explicit GroupContext(int32_t world_size) : world_size(world_size), memory_(2 * world_size) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      input(rank).fill(std::byte(rank + 1));
      schedules.push_back({.algorithm = "drawn"});
    }
  }

  std::array<std::byte, kBytes>& input(int32_t rank) { return memory_[2 * rank]; }
  std::array<std::byte, kBytes>& output(int32_t rank) { return memory_[2 * rank + 1]; }

  SimulatedOperation operation() {
    SimulatedOperation operation{.schedules = schedules};
    for (int32_t rank = 0; rank < world_size; ++rank) {
      operation.tensors.push_back({.inputs = {input(rank)}, .outputs = {output(rank)}});
    }
    return operation;
  }

  std::vector<Traffic> run(int32_t times = 1) {
    return simulate(options, std::vector<SimulatedOperation>(times, operation()));
  }

  std::string fault(int32_t times = 1) {
    try {
      run(times);
    } catch (const SimulationError& error) {
      return error.what();
    }
    return "no fault";
  }

  int32_t world_size;
  SimulatorOptions options{.world_size = world_size, .bank_bytes = 2 * kBytes, .mailbox_bytes = 16};
  std::vector<Schedule> schedules;

 private:
  std::vector<std::array<std::byte, kBytes>> memory_;
};

TEST(SimulateTest, PassesBytesThroughStagingAndCountsThem) {
  GroupContext group(2);
  add_copy(group.schedules[0], staging(0, 0, 0), input(0), kBytes);
  for (Schedule& schedule : group.schedules) add_barrier(schedule);
  add_copy(group.schedules[1], output(0), staging(0, 0, 0), kBytes);
  const std::vector<Traffic> traffic = group.run();
  EXPECT_EQ(group.output(1), group.input(0));
  EXPECT_EQ(traffic[1].staged_read_bytes, (std::vector<int64_t>{kBytes, 0}));
  EXPECT_EQ(traffic[0].copied_bytes, kBytes);
  EXPECT_EQ(traffic[0].memory_bytes, 2 * kBytes);
  EXPECT_EQ(traffic[0].barriers, 1);
}

TEST(SimulateTest, SendsThroughMailboxesThatAreSmallerThanTheMessage) {
  GroupContext group(3);
  for (int32_t rank = 0; rank < 2; ++rank) add_send(group.schedules[rank], rank + 1, input(0), kBytes);
  add_receive(group.schedules[1], 0, output(0), kBytes);
  add_receive(group.schedules[2], 1, output(0), kBytes);
  const std::vector<Traffic> traffic = group.run();
  EXPECT_EQ(group.output(1), group.input(0));
  EXPECT_EQ(group.output(2), group.input(1));
  EXPECT_EQ(traffic[1].sent_bytes, (std::vector<int64_t>{0, 0, kBytes}));
}

TEST(SimulateTest, ReportsADeadlockWithEveryRanksStep) {
  GroupContext group(2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    add_send(group.schedules[rank], 1 - rank, input(0), kBytes);
    add_receive(group.schedules[rank], 1 - rank, output(0), kBytes);
  }
  expect_words(group.fault(),
               {"deadlock", "rank 0, operation 0 drawn, step 0 of 2 (send 64", "rank 1", "16 bytes moved"});
}

TEST(SimulateTest, ReportsARankThatDoesNotComeToTheBarrier) {
  GroupContext group(2);
  add_barrier(group.schedules[0]);
  expect_words(group.fault(),
               {"deadlock", "rank 0, operation 0 drawn, step 0 of 1 (barrier)", "rank 1, operation 1: done"});
}

TEST(SimulateTest, ReportsBytesThatNobodyReceives) {
  GroupContext group(2);
  add_send(group.schedules[0], 1, input(0), 3);
  expect_words(group.fault(), {"3 bytes from rank 0 to rank 1 were sent but never received"});
}

TEST(SimulateTest, ReportsARaceInAnyInterleaving) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    GroupContext group(2);
    group.options.seed = seed;
    add_copy(group.schedules[0], staging(0, 0, 0), input(0), kBytes);
    add_copy(group.schedules[1], output(0), staging(0, 0, kBytes - 1), 1);
    expect_words(group.fault(), {"race", "staging[0] bank 0", "rank 0, operation 0", "rank 1, operation 0"});
  }
}

TEST(SimulateTest, ReportsARaceOnTensorsThatRanksShare) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    GroupContext group(2);
    group.options.seed = seed;
    for (Schedule& schedule : group.schedules) schedule.is_direct = true;
    const Region sources[] = {input(kBytes - 4)};
    const Region echoes[] = {peer_output(1, kBytes - 4)};
    add_reduce_for_all(group.schedules[0], output(0), echoes, sources, 4);
    add_copy(group.schedules[1], output(0), peer_input(0, 0), kBytes);
    expect_words(group.fault(), {"race", "output", "rank 0, operation 0", "rank 1, operation 0"});
    group.schedules[0].steps.insert(group.schedules[0].steps.begin(), Step{});
    add_barrier(group.schedules[1]);
    EXPECT_EQ(group.fault(), "no fault");
  }
}

TEST(SimulateTest, ReportsTensorsOfOthersThatCannotBeReached) {
  GroupContext group(2);
  add_copy(group.schedules[0], output(0), peer_input(1, 0), 1);
  expect_words(group.fault(), {"there is no peer_input[1] + 0"});  // not a direct schedule
  group.schedules[0].is_direct = true;
  EXPECT_EQ(group.fault(), "no fault");
  group.schedules[0].steps[0].source = peer_input(2, 0);
  expect_words(group.fault(), {"there is no peer_input[2] + 0"});
  group.schedules[0].steps[0].source = peer_input(1, kBytes);
  expect_words(group.fault(), {"outside its 64 bytes"});
  group.schedules[0].steps[0].source = input(0);
  group.schedules[0].steps[0].destination = peer_input(1, 0);
  expect_words(group.fault(), {"it writes to an input"});
  group.schedules[0].steps[0] = {
      .kind = StepKind::kCopy, .destination = output(0), .source = peer_input(1, 0), .bytes = 1};
  group.options.nodes = {{0}, {1}};
  expect_words(group.fault(), {"is on another node"});
}

TEST(SimulateTest, AllowsNeighboursAndReadersWithoutABarrier) {
  GroupContext group(2);
  add_copy(group.schedules[0], staging(0, 0, 0), input(0), kBytes);
  add_copy(group.schedules[1], staging(0, 0, kBytes), input(0), kBytes);
  for (Schedule& schedule : group.schedules) {
    add_barrier(schedule);
    add_copy(schedule, output(0), staging(0, 0, kBytes), kBytes);
  }
  EXPECT_EQ(group.fault(), "no fault");
}

// Note [Banks] in schedule.h: the next operation starts on the other bank, and may then not skip one.
TEST(SimulateTest, RotatesBanksBetweenOperations) {
  GroupContext group(2);
  add_copy(group.schedules[0], staging(0, 0, 0), input(0), kBytes);
  for (Schedule& schedule : group.schedules) add_barrier(schedule);
  add_copy(group.schedules[1], output(0), staging(0, 0, 0), kBytes);
  expect_words(group.fault(2), {"race"});
  for (Schedule& schedule : group.schedules) schedule.banks_used = 1;
  EXPECT_EQ(group.fault(5), "no fault");
  for (Schedule& schedule : group.schedules) schedule.banks_used = 2;
  expect_words(group.fault(2), {"race"});
}

TEST(SimulateTest, ReportsRanksThatDisagreeOnTheBanksUsed) {
  GroupContext group(2);
  group.schedules[1].banks_used = 1;
  expect_words(group.fault(), {"banks"});
}

TEST(SimulateTest, ReportsStepsOutsideTheirBuffers) {
  const auto fault_of = [](Region destination, Region source, int64_t bytes) {
    GroupContext group(1);
    add_copy(group.schedules[0], destination, source, bytes);
    return group.fault();
  };
  expect_words(fault_of(output(1), input(0), kBytes), {"64 bytes at output[0] + 1 are outside its 64 bytes"});
  expect_words(fault_of(output(0), input(-1), 1), {"outside"});
  expect_words(fault_of(staging(0, 0, 2 * kBytes), input(0), 1), {"outside"});
  expect_words(fault_of(staging(1, 0, 0), input(0), 1), {"there is no staging[1]"});
  expect_words(fault_of({.space = Space::kOutput, .index = 1}, input(0), 1), {"there is no output[1]"});
  expect_words(fault_of({.space = Space::kScratch}, input(0), 1), {"outside its 0 bytes"});
  expect_words(fault_of(input(0), output(0), 1), {"writes to an input"});
  expect_words(fault_of(output(1), output(0), 2), {"overlaps"});
}

TEST(SimulateTest, ReportsReductionsThatCutAnElement) {
  GroupContext group(1);
  const Region source = input(0);
  add_reduce(group.schedules[0], output(0), {&source, 1}, 6);
  SimulatedOperation operation = group.operation();
  operation.dtype = DType::kFloat32;
  EXPECT_THROW(simulate(group.options, {operation}), SimulationError);
}

TEST(SimulateTest, RefusesAnOperationWithoutAScheduleForEachRank) {
  GroupContext group(2);
  group.options.world_size = 3;
  EXPECT_THROW(group.run(), std::invalid_argument);
}

TEST(SimulateTest, EstimatesTheSameTimeInAnyInterleaving) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    GroupContext group(2);
    group.options.seed = seed;
    group.options.model = {.barrier_us = 5, .bytes_per_us = 2};
    group.options.link = [](int32_t, int32_t) {
      return SimulatedLink{.latency_us = 10, .sender_bytes_per_us = 4, .receiver_bytes_per_us = 4};
    };
    add_copy(group.schedules[0], staging(0, 0, 0), input(0), kBytes);  // 2 * 64 / 2 = 64 us
    for (Schedule& schedule : group.schedules) add_barrier(schedule);  // at 69 us
    add_send(group.schedules[0], 1, input(0), kBytes);                 // 16 us
    add_receive(group.schedules[1], 0, output(0), kBytes);             // 10 us later
    const std::vector<Traffic> traffic = group.run();
    EXPECT_DOUBLE_EQ(traffic[0].time_us, 85);
    EXPECT_DOUBLE_EQ(traffic[1].time_us, 95);
  }
}

}  // namespace
}  // namespace zeropg

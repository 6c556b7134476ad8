// Loops run their steps chunk by chunk, as many are under way as the lags say, and the last one may be shorter.
#include "backend/collectives/schedule/schedule_cursor.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {
namespace {

using Visit = std::tuple<size_t, int64_t>;  // step, chunk

std::vector<Visit> visits(const Schedule& schedule) {
  std::vector<Visit> all;
  for (ScheduleCursor cursor(schedule); !cursor.is_done(); cursor.next()) {
    all.emplace_back(cursor.position().step, cursor.position().chunk);
  }
  return all;
}

TEST(ScheduleCursorTest, AScheduleWithoutLoopsIsAList) {
  Schedule schedule;
  EXPECT_TRUE(ScheduleCursor(schedule).is_done());
  add_copy(schedule, output(0), input(0), 8);
  add_barrier(schedule);
  EXPECT_EQ(visits(schedule), (std::vector<Visit>{{0, 0}, {1, 0}}));
}

TEST(ScheduleCursorTest, StepsOfAPipelineWorkOnDifferentChunksAtOnce) {
  Schedule schedule;
  add_copy({schedule, 1, 3}, output(0), staging(0, 0, 0), 8);
  add_copy({schedule, 0, 3}, staging(0, 0, 0), input(0), 8);
  EXPECT_EQ(visits(schedule), (std::vector<Visit>{{1, 0}, {0, 0}, {1, 1}, {0, 1}, {1, 2}, {0, 2}}));
  EXPECT_EQ(steps_to_run(schedule), 6);
}

TEST(ScheduleCursorTest, LoopsFollowEachOther) {
  Schedule schedule;
  add_copy({schedule, 0, 2}, output(0), input(0), 8);
  begin_loop(schedule);
  begin_loop(schedule);  // an empty one
  add_send({schedule, 0, 3}, 1, input(0), 8);
  add_receive({schedule, 0, 1}, 1, output(0), 8);
  EXPECT_EQ(visits(schedule), (std::vector<Visit>{{0, 0}, {0, 1}, {1, 0}, {2, 0}, {1, 1}, {1, 2}}));
}

TEST(ScheduleCursorTest, RegionsAdvanceAndTheLastChunkIsAsLongAsItIs) {
  Schedule schedule;
  const Chunks chunks = chunks_of_size(20, 8);
  const Region sources[] = {with_stride(input(0), 8), staging(1, 1, 64)};
  add_reduce({schedule, 0, chunks.count}, with_stride({.space = Space::kScratch, .offset_bytes = 16}, 32), sources,
             chunks);
  std::vector<int64_t> bytes, inputs, scratch, banks;
  for (ScheduleCursor cursor(schedule); !cursor.is_done(); cursor.next()) {
    bytes.push_back(cursor.step().bytes);
    scratch.push_back(cursor.step().destination.offset_bytes);
    inputs.push_back(cursor.source(0).offset_bytes);
    banks.push_back(cursor.source(1).bank);
    EXPECT_EQ(cursor.source(1).offset_bytes, 64);
  }
  EXPECT_EQ(bytes, (std::vector<int64_t>{8, 8, 4}));
  EXPECT_EQ(inputs, (std::vector<int64_t>{0, 8, 16}));
  EXPECT_EQ(scratch, (std::vector<int64_t>{16, 48, 16}));
  EXPECT_EQ(banks, (std::vector<int64_t>{1, 0, 1}));
  EXPECT_EQ(total_bytes(schedule.steps[0]), 20);
}

TEST(ScheduleCursorTest, AStepWithoutBytesInTheLastChunkEndsBeforeIt) {
  Schedule schedule;
  add_copy({schedule, 0, 3}, output(0), input(0), {8, 0});
  add_copy({schedule, 0, 1}, output(0), input(0), {8, 0});
  add_copy({schedule, 0, 1}, output(0), input(0), {8, 5});
  ASSERT_EQ(schedule.steps.size(), 2);
  EXPECT_EQ(schedule.steps[0].chunks, 2);
  EXPECT_EQ(total_bytes(schedule.steps[0]), 16);
  EXPECT_EQ(schedule.steps[1].bytes, 5);
}

TEST(ScheduleCursorTest, RestartsWhereItBegan) {
  Schedule schedule;
  add_copy({schedule, 0, 2}, output(0), input(0), 8);
  ScheduleCursor cursor(schedule);
  cursor.next();
  cursor.restart();
  EXPECT_EQ(cursor.position().chunk, 0);
}

}  // namespace
}  // namespace zeropg

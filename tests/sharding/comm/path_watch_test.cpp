#include "sharding/comm/path_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace zeropg {
namespace {

using Position = PathWatch::Position;

TEST(PathWatch, TwoRanksWaitForEverWhereNeitherHasBegunWhatTheOtherWaitsFor) {
  const Position gathers{.begun = {8, 2}, .waits_in = PathWatch::kGather, .waits_for = 8};
  Position reduces{.begun = {7, 3}, .waits_in = PathWatch::kReduction, .waits_for = 3};
  EXPECT_TRUE(PathWatch::is_deadlock(gathers, reduces));
  EXPECT_TRUE(PathWatch::is_deadlock(reduces, gathers));
  reduces.waits_for = 2;  // the other has begun it: it takes long, no more
  EXPECT_FALSE(PathWatch::is_deadlock(gathers, reduces));
  EXPECT_FALSE(PathWatch::is_deadlock(reduces, gathers));
  reduces.waits_for = 3;
  reduces.begun[PathWatch::kGather] = 8;
  EXPECT_FALSE(PathWatch::is_deadlock(gathers, reduces));
  EXPECT_FALSE(PathWatch::is_deadlock(gathers, Position()));
  EXPECT_FALSE(PathWatch::is_deadlock(Position(), gathers));
}

TEST(PathWatch, WhatARankSaysIsReadAsItWasMeant) {
  const Position said{.begun = {8, 2}, .waits_in = PathWatch::kReduction, .waits_for = 9};
  const Position read = PathWatch::decode(PathWatch::encode(said));
  EXPECT_EQ(read.begun, said.begun);
  EXPECT_EQ(read.waits_in, said.waits_in);
  EXPECT_EQ(read.waits_for, said.waits_for);
  for (const char* damaged : {"", "8", "8 2 x", "-"}) EXPECT_EQ(PathWatch::decode(damaged).waits_for, 0U) << damaged;
}

TEST(PathWatch, EndsTheWaitsOfBothRanksWithinSecondsAndNoOtherWait) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::promise<std::string> said[3];
  std::vector<std::unique_ptr<PathWatch>> watches;
  for (int rank = 0; rank < 3; ++rank) {
    watches.push_back(std::make_unique<PathWatch>(
        store, rank, 3, [&, rank](PathWatch::Kind, const std::string& why) { said[rank].set_value(why); }));
  }
  // 0 and 1 gather a unit that 2 leaves out, which reduces before them.
  for (const int rank : {0, 1, 2}) watches[rank]->note_begun(PathWatch::kGather);
  for (const int rank : {0, 1})
    watches[rank]->begin_wait(PathWatch::kGather, watches[rank]->note_begun(PathWatch::kGather), "block 1");
  watches[2]->begin_wait(PathWatch::kReduction, watches[2]->note_begun(PathWatch::kReduction), "head");
  std::future<std::string> results[3];
  for (int rank = 0; rank < 3; ++rank) {
    results[rank] = said[rank].get_future();
    ASSERT_EQ(results[rank].wait_for(std::chrono::seconds(30)), std::future_status::ready) << rank;
  }
  const std::string of_first = results[0].get();
  EXPECT_NE(of_first.find("this rank for the gather of block 1 (number 2), of which rank 2 has begun 1"),
            std::string::npos)
      << of_first;
  EXPECT_NE(results[2].get().find("reduction of head (number 1), of which rank "), std::string::npos);
}

}  // namespace
}  // namespace zeropg

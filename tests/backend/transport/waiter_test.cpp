#include "backend/transport/waiter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace zeropg {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr microseconds kPatience{2000};

int rounds_until_sleep(Waiter& waiter) {
  int rounds = 0;
  for (; !waiter.should_sleep(); ++rounds) waiter.pause();
  return rounds;
}

TEST(Waiter, SpinsOnlyWhenEveryRankHasACpu) {
  Waiter alone(4, microseconds(0), 4);
  Waiter crowded(5, microseconds(0), 4);
  EXPECT_GT(rounds_until_sleep(alone), 10);
  EXPECT_EQ(rounds_until_sleep(crowded), 1);
}

TEST(Waiter, YieldsForAsLongAsItsPatienceLasts) {
  Waiter waiter(64, kPatience, 1);
  EXPECT_FALSE(waiter.should_sleep());
  const auto start = steady_clock::now();
  rounds_until_sleep(waiter);
  EXPECT_GE(steady_clock::now() - start, kPatience);
}

TEST(Waiter, StaysAsleepUntilReset) {
  Waiter waiter(1, kPatience, 1);
  rounds_until_sleep(waiter);
  waiter.pause();
  EXPECT_TRUE(waiter.should_sleep());
  waiter.reset();
  EXPECT_FALSE(waiter.should_sleep());
  const auto start = steady_clock::now();
  rounds_until_sleep(waiter);
  EXPECT_GE(steady_clock::now() - start, kPatience);
}

TEST(UsableCpus, IsTheLesserOfAffinityAndQuota) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  EXPECT_EQ(usable_cpus(8, kNoLimit), 8);
  EXPECT_EQ(usable_cpus(8, 2.0), 2);
  EXPECT_EQ(usable_cpus(8, 1.5), 1);
  EXPECT_EQ(usable_cpus(8, 0.2), 1);
  EXPECT_EQ(usable_cpus(2, 100.0), 2);
  EXPECT_GE(usable_cpus(), 1);
}

}  // namespace
}  // namespace zeropg

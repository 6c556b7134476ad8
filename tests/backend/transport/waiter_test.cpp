#include "backend/transport/waiter.h"

#include <gtest/gtest.h>

#include <limits>

namespace zeropg {
namespace {

int rounds_until_sleep(Waiter& waiter) {
  int rounds = 0;
  for (; !waiter.should_sleep(); ++rounds) waiter.pause();
  return rounds;
}

TEST(Waiter, SpinsOnlyWhenEveryRankHasACpu) {
  Waiter alone(4, 4);
  Waiter crowded(5, 4);
  EXPECT_GT(rounds_until_sleep(alone), rounds_until_sleep(crowded));
}

TEST(Waiter, YieldsBeforeItSleepsEvenWhenCrowded) {
  Waiter waiter(64, 1);
  EXPECT_FALSE(waiter.should_sleep());
  EXPECT_GT(rounds_until_sleep(waiter), 10);
}

TEST(Waiter, StaysAsleepUntilReset) {
  Waiter waiter(1, 1);
  const int rounds = rounds_until_sleep(waiter);
  EXPECT_TRUE(waiter.should_sleep());
  waiter.reset();
  EXPECT_EQ(rounds_until_sleep(waiter), rounds);
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

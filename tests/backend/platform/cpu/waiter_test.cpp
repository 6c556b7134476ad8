#include "backend/platform/cpu/waiter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace zeropg {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr microseconds kPatience{2000};
YieldCost never(std::chrono::hours(1));

int rounds_until_sleep(Waiter& waiter) {
  int rounds = 0;
  for (; !waiter.should_sleep(); ++rounds) waiter.pause();
  return rounds;
}

TEST(Waiter, SpinsOnlyWhenEveryRankHasACpu) {
  Waiter alone(4, microseconds(0), 4, never);
  Waiter crowded(5, microseconds(0), 4, never);
  EXPECT_GT(rounds_until_sleep(alone), 10);
  EXPECT_EQ(rounds_until_sleep(crowded), 1);
}

TEST(Waiter, YieldsForAsLongAsItsPatienceLasts) {
  Waiter waiter(64, kPatience, 1, never);
  EXPECT_FALSE(waiter.should_sleep());
  const auto start = steady_clock::now();
  rounds_until_sleep(waiter);
  EXPECT_GE(steady_clock::now() - start, kPatience);
}

TEST(Waiter, StaysAsleepUntilReset) {
  Waiter waiter(1, kPatience, 1, never);
  rounds_until_sleep(waiter);
  waiter.pause();
  EXPECT_TRUE(waiter.should_sleep());
  waiter.reset();
  EXPECT_FALSE(waiter.should_sleep());
  const auto start = steady_clock::now();
  rounds_until_sleep(waiter);
  EXPECT_GE(steady_clock::now() - start, kPatience);
}

TEST(Waiter, SleepsAtOnceWhileOthersWantTheCpus) {
  YieldCost yield_cost(microseconds(1));
  const auto now = steady_clock::now();
  yield_cost.note_yield(now - microseconds(2), now);
  Waiter waiter(64, std::chrono::hours(1), 1, yield_cost);
  EXPECT_EQ(rounds_until_sleep(waiter), 1);
}

TEST(YieldCost, IsForgottenAfterAWhile) {
  YieldCost yield_cost;
  const auto now = steady_clock::now();
  EXPECT_FALSE(yield_cost.is_seen(now));
  yield_cost.note_yield(now - YieldCost::kLongYield / 2, now);
  EXPECT_FALSE(yield_cost.is_seen(now));
  yield_cost.note_yield(now - YieldCost::kLongYield, now);
  EXPECT_TRUE(yield_cost.is_seen(now));
  EXPECT_TRUE(yield_cost.is_seen(now + YieldCost::kShortest / 2));
  EXPECT_FALSE(yield_cost.is_seen(now + YieldCost::kShortest));
}

TEST(YieldCost, LastsLongerTheOftenerItIsFound) {
  YieldCost yield_cost;
  auto now = steady_clock::now();
  const auto find = [&] {
    yield_cost.note_yield(now - YieldCost::kLongYield, now);
    const auto start = now;
    while (yield_cost.is_seen(now)) now += microseconds(500);
    return now - start;
  };
  EXPECT_EQ(find(), YieldCost::kShortest);
  EXPECT_EQ(find(), 2 * YieldCost::kShortest);
  for (int i = 0; i < 10; ++i) find();
  EXPECT_EQ(find(), YieldCost::kLongest);
  now += 3 * YieldCost::kLongest;  // calm
  EXPECT_EQ(find(), YieldCost::kShortest);
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

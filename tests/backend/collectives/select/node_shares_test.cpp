// Shares make the slowest link's time as short as any shares can.
#include "backend/collectives/select/node_shares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

namespace zeropg {
namespace {

std::vector<int32_t> shares_for(const std::vector<double>& speeds) {
  CostModel model;
  model.node_bytes_per_us = speeds;
  return node_shares(model, std::vector<std::vector<int32_t>>(speeds.size()));
}

// Of one byte in the direct exchange.
double time_of(const std::vector<double>& speeds, const std::vector<int32_t>& shares) {
  double slowest = 0;
  for (size_t node = 0; node < speeds.size(); ++node) {
    const double share = shares.empty() ? 1.0 / static_cast<double>(speeds.size()) : shares[node] / 1024.0;
    slowest = std::max(slowest, (1 + (static_cast<double>(speeds.size()) - 2) * share) / speeds[node]);
  }
  return slowest;
}

TEST(NodeSharesTest, ANodeAtHalfSpeedCompletesNothing) {
  EXPECT_EQ(shares_for({100, 100, 50, 100}), (std::vector<int32_t>{341, 342, 0, 341}));
  EXPECT_NEAR(time_of({1, 1, 0.5, 1}, shares_for({1, 1, 0.5, 1})), 2, 1e-9);  // equal shares take 3
}

TEST(NodeSharesTest, EveryLinkThatHasAShareTakesEquallyLong) {
  EXPECT_EQ(shares_for({100, 80, 100}), (std::vector<int32_t>{439, 146, 439}));
}

// All must send and receive the bytes once, and 2 (m - 1) times the bytes must cross in all.
TEST(NodeSharesTest, ReachTheLowerBoundOfUnequalLinks) {
  std::mt19937_64 random(7);
  for (size_t nodes = 3; nodes < 40; ++nodes) {
    std::vector<double> speeds(nodes);
    for (double& speed : speeds) speed = 10.0 + static_cast<double>(random() % 1000);
    const std::vector<int32_t> shares = shares_for(speeds);
    EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), 0), kWholeShare);
    EXPECT_GE(*std::min_element(shares.begin(), shares.end()), 0);
    const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
    const double slowest = *std::min_element(speeds.begin(), speeds.end());
    const double bound = std::max(1 / slowest, 2 * (static_cast<double>(nodes) - 1) / sum);
    EXPECT_LE(time_of(speeds, shares), 1.03 * bound);
  }
}

TEST(NodeSharesTest, AreEqualWhereLinksAreAlikeUnknownOrTwo) {
  EXPECT_TRUE(shares_for({}).empty());
  EXPECT_TRUE(shares_for({100, 10}).empty());
  EXPECT_TRUE(shares_for({100, 91, 95}).empty());
  EXPECT_FALSE(shares_for({100, 90, 95}).empty());
}

TEST(NodeSharesTest, RefuseSpeedsOfOtherNodes) {
  CostModel model;
  model.node_bytes_per_us = {1, 2, 3};
  EXPECT_THROW(node_shares(model, std::vector<std::vector<int32_t>>(4)), std::invalid_argument);
}

}  // namespace
}  // namespace zeropg

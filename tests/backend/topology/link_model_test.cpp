#include "backend/topology/link_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace zeropg {
namespace {

using Racks = std::vector<std::vector<int32_t>>;
constexpr size_t kWindows = 6;

// What `rate(from, to)` gives, up to `noise` of it less or more in each window.
template <typename Rate>
std::vector<Flow> flows_at(int32_t nodes, const Rate& rate, double noise = 0, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> factor(1 - noise, 1 + noise);
  std::vector<Flow> flows;
  for (int32_t to = 0; to < nodes; ++to) {
    for (const int32_t distance : probe_distances(nodes)) {
      Flow& flow = flows.emplace_back(Flow{.from = (to - distance + nodes) % nodes, .to = to});
      for (size_t window = 0; window < kWindows; ++window) {
        flow.bytes_per_us.push_back(rate(flow.from, to) * factor(random));
      }
    }
  }
  return flows;
}

TEST(ProbeDistances, ReachEverybodyInSmallGroupsAndEightInLargeOnes) {
  EXPECT_EQ(probe_distances(1), std::vector<int32_t>());
  EXPECT_EQ(probe_distances(2), (std::vector<int32_t>{1}));
  EXPECT_EQ(probe_distances(9), (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(probe_distances(10), (std::vector<int32_t>{1, 2, 4, 8}));
  EXPECT_EQ(probe_distances(2000), (std::vector<int32_t>{1, 2, 4, 8, 16, 32, 64, 128}));
}

// Of 4 nodes, node 2 at half speed: 12.5 of 25 bytes/us, in three parts; the others give each other the rest.
double one_slow(int32_t from, int32_t to) { return from == 2 || to == 2 ? 12.5 / 3 : (25 - 12.5 / 3) / 2; }

TEST(LinkModel, FindsASlowLinkThroughNoise) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<double> speeds = model_links(4, {}, {flows_at(4, one_slow, 0.15, seed)}).node_bytes_per_us;
    ASSERT_EQ(speeds.size(), 4U);
    EXPECT_NEAR(speeds[0], 25, 3);
    EXPECT_NEAR(speeds[2], 12.5, 1.5);
    EXPECT_EQ(speeds[1], speeds[0]);
    EXPECT_EQ(speeds[3], speeds[0]);
  }
}

TEST(LinkModel, TakesNoiseForNoDifference) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const auto alike = [](int32_t, int32_t) { return 300.0; };
    const std::vector<double> speeds = model_links(4, {}, {flows_at(4, alike, 0.4, seed)}).node_bytes_per_us;
    EXPECT_EQ(speeds, std::vector<double>(4, speeds.at(0)));
  }
  // A link that is a tenth slower is as good as the others.
  const auto nearly = [](int32_t from, int32_t to) { return from == 1 || to == 1 ? 9.0 : 10.0; };
  EXPECT_EQ(model_links(3, {}, {flows_at(3, nearly)}).node_bytes_per_us, std::vector<double>(3, 19));
}

TEST(LinkModel, ABusyProcessorSaysNothingAboutALink) {
  const std::vector<double> fast = model_links(4, {}, {flows_at(4, one_slow), {0.1, 0.1, 0.9, 0.1}}).node_bytes_per_us;
  EXPECT_EQ(fast, std::vector<double>(4, fast.at(0)));
  const std::vector<double> one = model_links(4, {}, {flows_at(4, one_slow), {0.9, 0.9, 0.5, 0.9}}).node_bytes_per_us;
  EXPECT_LT(one.at(2), one.at(0));
}

TEST(LinkModel, TheSlowerDirectionCounts) {
  const auto slow_to_send = [](int32_t from, int32_t) { return from == 0 ? 5.0 : 20.0; };
  const std::vector<double> speeds = model_links(4, {}, {flows_at(4, slow_to_send)}).node_bytes_per_us;
  EXPECT_EQ(speeds[0], 15);
  EXPECT_GT(speeds[1], 2 * speeds[0]);
}

TEST(LinkModel, FindsUplinksThatAreALimit) {
  const Racks racks{{0, 1}, {2, 3}};
  const auto limited = [](int32_t from, int32_t to) { return from / 2 == to / 2 ? 22.0 : 1.5; };
  const LinkModel model = model_links(4, racks, {flows_at(4, limited, 0.1)});
  for (const double speed : model.node_bytes_per_us) EXPECT_NEAR(speed, 25, 1);
  ASSERT_EQ(model.uplink_bytes_per_us.size(), 2U);
  EXPECT_NEAR(model.uplink_bytes_per_us[0], 6, 0.7);
  const auto free = [](int32_t, int32_t) { return 8.0; };
  EXPECT_TRUE(model_links(4, racks, {flows_at(4, free, 0.1)}).uplink_bytes_per_us.empty());
  EXPECT_TRUE(model_links(4, {{0, 1, 2, 3}}, {flows_at(4, limited)}).uplink_bytes_per_us.empty());
  EXPECT_TRUE(model_links(2, {{0}, {1}}, {flows_at(2, limited)}).uplink_bytes_per_us.empty());
}

TEST(LinkModel, KnowsNothingWhereNothingCame) {
  const auto cut = [](int32_t from, int32_t to) { return from == 1 || to == 1 ? 0.0 : 10.0; };
  EXPECT_EQ(model_links(3, {}, {flows_at(3, cut)}), LinkModel());
}

// The windows of `follow_links` that `rate(from, to)` gives, as of flows_at.
template <typename Rate>
std::vector<LinkTraffic> traffic_at(int32_t nodes, const Rate& rate, double noise = 0, uint32_t seed = 1) {
  std::vector<LinkTraffic> windows(kFollowedWindows,
                                   LinkTraffic{std::vector<double>(nodes), std::vector<double>(nodes)});
  for (const Flow& flow : flows_at(nodes, rate, noise, seed)) {
    for (size_t window = 0; window < windows.size(); ++window) {
      windows[window].out_bytes_per_us[flow.from] += flow.bytes_per_us[window];
      windows[window].in_bytes_per_us[flow.to] += flow.bytes_per_us[window];
    }
  }
  return windows;
}

double alike(int32_t /*from*/, int32_t /*to*/) { return 25.0 / 3; }

TEST(FollowedLinks, StayAsTheyAreInNoise) {
  const LinkModel equal{.node_bytes_per_us = std::vector<double>(4, 22)};
  const LinkModel unequal{.node_bytes_per_us = {26, 26, 13, 26}};
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    ASSERT_EQ(follow_links(equal, traffic_at(4, alike, 0.4, seed)), equal) << seed;
    ASSERT_EQ(follow_links(LinkModel(), traffic_at(4, alike, 0.4, seed)), LinkModel()) << seed;
    ASSERT_EQ(follow_links(unequal, traffic_at(4, one_slow, 0.1, seed)), unequal) << seed;
  }
}

TEST(FollowedLinks, AreTakenAnewWhereOneHasDroppedOrRecovered) {
  const LinkModel equal{.node_bytes_per_us = std::vector<double>(4, 22), .is_followed = true};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const LinkModel dropped = follow_links(equal, traffic_at(4, one_slow, 0.15, seed));
    ASSERT_EQ(dropped.node_bytes_per_us.size(), 4U);
    EXPECT_NEAR(dropped.node_bytes_per_us[2], 12.5, 1.5);
    EXPECT_NEAR(dropped.node_bytes_per_us[0], 25, 3);
    EXPECT_EQ(dropped.node_bytes_per_us[3], dropped.node_bytes_per_us[0]);
    EXPECT_TRUE(dropped.is_followed);
    const LinkModel recovered = follow_links(dropped, traffic_at(4, alike, 0.15, seed));
    EXPECT_EQ(recovered.node_bytes_per_us, std::vector<double>(4, recovered.node_bytes_per_us.at(0)));
  }
}

TEST(FollowedLinks, NeedAllWindowsButOneOfASlowLinkAndTwoOfAFastOne) {
  const LinkModel equal{.node_bytes_per_us = std::vector<double>(4, 25)};
  const auto after = [&](size_t slow_windows) {
    std::vector<LinkTraffic> windows = traffic_at(4, alike);
    const std::vector<LinkTraffic> slow = traffic_at(4, one_slow);
    std::copy_n(slow.begin(), slow_windows, windows.begin());
    return follow_links(equal, windows);
  };
  EXPECT_EQ(after(kFollowedWindows - 2), equal);
  EXPECT_NE(after(kFollowedWindows - 1), equal);
  std::vector<LinkTraffic> few = traffic_at(4, one_slow);
  few.pop_back();
  EXPECT_EQ(follow_links(equal, few), equal);
}

TEST(FollowedLinks, OfTwoNodesAreOneAnothersAndUplinksStay) {
  const LinkModel two{.node_bytes_per_us = {25, 25}};
  const auto slow_there = [](int32_t from, int32_t) { return from == 0 ? 5.0 : 20.0; };
  EXPECT_EQ(follow_links(two, traffic_at(2, slow_there)), two);
  const LinkModel racks{.node_bytes_per_us = std::vector<double>(4, 25), .uplink_bytes_per_us = {7, 9}};
  const LinkModel after = follow_links(racks, traffic_at(4, one_slow));
  EXPECT_NE(after, racks);
  EXPECT_EQ(after.uplink_bytes_per_us, racks.uplink_bytes_per_us);
}

TEST(FollowedLinks, ChangeNothingWhereNothingCame) {
  const LinkModel equal{.node_bytes_per_us = std::vector<double>(3, 25)};
  const auto cut = [](int32_t from, int32_t to) { return from == 1 || to == 1 ? 0.0 : 10.0; };
  EXPECT_EQ(follow_links(equal, traffic_at(3, cut)), equal);
}

}  // namespace
}  // namespace zeropg

#include "backend/diagnostics/wait_graph.h"

#include <gtest/gtest.h>

#include <map>

namespace zeropg {
namespace {

WaitCulprits find(const std::vector<int32_t>& awaited, const std::map<int32_t, std::vector<int32_t>>& waits) {
  return find_culprits(0, awaited, [&](int32_t rank) {
    const auto found = waits.find(rank);
    return found == waits.end() ? std::vector<int32_t>() : found->second;
  });
}

TEST(WaitCulprits, SaysNothingOfRanksThatWaitForNobody) {
  const WaitCulprits found = find({1, 2}, {{3, {4}}});
  EXPECT_EQ(found.chain, "");
  EXPECT_EQ(found.culprits, (std::vector<int32_t>{1, 2}));
}

TEST(WaitCulprits, FollowsAChainToItsEnd) {
  const WaitCulprits found = find({1}, {{1, {2}}, {2, {4, 3}}});
  EXPECT_EQ(found.chain, "; rank 1 itself waits for rank 2; rank 2 itself waits for ranks 4, 3");
  EXPECT_EQ(found.culprits, (std::vector<int32_t>{3, 4}));
}

TEST(WaitCulprits, BlamesWhomItWaitsForWhereAllWaitInACircle) {
  const WaitCulprits found = find({1}, {{0, {1}}, {1, {2}}, {2, {0, 1}}});
  EXPECT_EQ(found.chain, "; rank 1 itself waits for rank 2; rank 2 itself waits for ranks 0, 1");
  EXPECT_EQ(found.culprits, (std::vector<int32_t>{1}));
}

TEST(WaitCulprits, BlamesNobodyWhoWaitsForThisRank) {
  EXPECT_EQ(find({1, 2}, {{1, {0, 2}}}).culprits, (std::vector<int32_t>{2}));
}

TEST(WaitCulprits, IsShortForManyRanks) {
  std::map<int32_t, std::vector<int32_t>> waits;
  for (int32_t rank = 1; rank < 100; ++rank) waits[rank] = {rank + 1};
  const WaitCulprits found = find({1}, waits);
  const std::string& text = found.chain;
  EXPECT_NE(text.find("rank 8 itself"), std::string::npos);
  EXPECT_EQ(text.find("rank 9 itself"), std::string::npos);
  EXPECT_EQ(found.culprits, (std::vector<int32_t>{100}));
}

}  // namespace
}  // namespace zeropg

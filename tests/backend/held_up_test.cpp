#include "backend/held_up.h"

#include <gtest/gtest.h>

#include <map>

namespace zeropg {
namespace {

std::string describe(const std::vector<int32_t>& awaited, const std::map<int32_t, std::vector<int32_t>>& waits) {
  return describe_held_up(0, awaited, [&](int32_t rank) {
    const auto found = waits.find(rank);
    return found == waits.end() ? std::vector<int32_t>() : found->second;
  });
}

TEST(HeldUp, SaysNothingOfRanksThatWaitForNobody) { EXPECT_EQ(describe({1, 2}, {{3, {4}}}), ""); }

TEST(HeldUp, FollowsAChainToItsEnd) {
  EXPECT_EQ(describe({1}, {{1, {2}}, {2, {3, 4}}}),
            "; rank 1 itself waits for rank 2; rank 2 itself waits for ranks 3, 4");
}

TEST(HeldUp, EndsWhereRanksWaitInACircle) {
  EXPECT_EQ(describe({1}, {{0, {1}}, {1, {2}}, {2, {0, 1}}}),
            "; rank 1 itself waits for rank 2; rank 2 itself waits for ranks 0, 1");
}

TEST(HeldUp, IsShortForManyRanks) {
  std::map<int32_t, std::vector<int32_t>> waits;
  for (int32_t rank = 1; rank < 100; ++rank) waits[rank] = {rank + 1};
  const std::string text = describe({1}, waits);
  EXPECT_NE(text.find("rank 8 itself"), std::string::npos);
  EXPECT_EQ(text.find("rank 9 itself"), std::string::npos);
}

}  // namespace
}  // namespace zeropg

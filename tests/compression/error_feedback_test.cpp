#include "compression/error_feedback.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <stdexcept>

namespace zeropg {
namespace {

std::vector<float> counted(int64_t count, float first = 0.0f) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST(ResidualStoreTest, ReservesZerosAndFindsThemAgain) {
  ResidualStore store;
  const auto first = store.reserve("weight", kContributionHop, 10, 20);
  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].start, 10);
  EXPECT_EQ(*first[0].values, std::vector<float>(10, 0.0f));
  (*first[0].values)[3] = 1.5f;
  const auto again = store.reserve("weight", kContributionHop, 13, 14);
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ((*again[0].values)[13 - again[0].start], 1.5f);
  EXPECT_EQ(store.bytes(), 40);
  EXPECT_TRUE(store.reserve("weight", kContributionHop, 5, 5).empty());
}

TEST(ResidualStoreTest, FillsGapsWithoutMovingWhatIsThere) {
  ResidualStore store;
  store.load("weight", kContributionHop, 10, counted(5));
  store.load("weight", kContributionHop, 20, counted(5, 50));
  const float* before = store.segments()[0].values->data();
  const auto pieces = store.reserve("weight", kContributionHop, 0, 30);
  ASSERT_EQ(pieces.size(), 5U);
  int64_t position = 0;
  for (const ResidualSegment& piece : pieces) {
    EXPECT_EQ(piece.start, position);
    position += static_cast<int64_t>(piece.values->size());
  }
  EXPECT_EQ(position, 30);
  EXPECT_EQ(pieces[1].values->data(), before);
  EXPECT_EQ((*pieces[3].values)[2], 52.0f);
  EXPECT_EQ(store.bytes(), 120);
}

TEST(ResidualStoreTest, KeepsNamesAndHopsApart) {
  ResidualStore store;
  store.load("a", kContributionHop, 0, counted(3, 1));
  store.load("a", kResultHop, 0, counted(3, 10));
  store.load("b", kContributionHop, 0, counted(3, 100));
  const auto all = store.segments();
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ((*all[0].values)[0], 1.0f);
  EXPECT_EQ((*all[1].values)[0], 10.0f);
  EXPECT_EQ(all[1].hop, kResultHop);
  EXPECT_EQ(all[2].name, "b");
}

TEST(ResidualStoreTest, LoadsOverWhatIsThereInOtherPieces) {
  ResidualStore store;
  store.reserve("weight", kContributionHop, 0, 7);
  store.reserve("weight", kContributionHop, 7, 20);
  store.load("weight", kContributionHop, 5, counted(20, 1));
  float expected = 1;
  for (const ResidualSegment& piece : store.reserve("weight", kContributionHop, 5, 25)) {
    for (size_t i = 0; i < piece.values->size(); ++i) {
      if (piece.start + static_cast<int64_t>(i) >= 5) {
        EXPECT_EQ((*piece.values)[i], expected++);
      }
    }
  }
  EXPECT_EQ(expected, 21);
}

TEST(ResidualStoreTest, AddsUpArrearsOfOverlappingRanges) {
  ResidualStore store;
  store.load("weight", kContributionHop, 0, counted(4));
  store.owe("weight", 0, counted(4, 1));
  store.owe("weight", 2, counted(4, 10));
  std::vector<float> owed;
  for (const ResidualSegment& piece : store.take("weight", kArrearsHop)) {
    owed.insert(owed.end(), piece.values->begin(), piece.values->end());
  }
  EXPECT_EQ(owed, (std::vector<float>{1, 2, 13, 15, 12, 13}));
  EXPECT_TRUE(store.take("weight", kArrearsHop).empty());
  EXPECT_EQ(store.segments().size(), 1U);  // what another hop lost is still there
  EXPECT_THROW(store.owe("weight", 0, std::vector<float>{std::numeric_limits<float>::quiet_NaN()}),
               std::invalid_argument);
  EXPECT_TRUE(store.take("weight", kArrearsHop).empty());
}

TEST(ResidualStoreTest, ScalesAndForgets) {
  ResidualStore store;
  store.load("weight", kContributionHop, 0, counted(3, 2));
  store.scale(0.5f);
  EXPECT_EQ(*store.segments()[0].values, (std::vector<float>{1.0f, 1.5f, 2.0f}));
  const auto held = store.segments();
  store.clear();
  EXPECT_EQ(store.bytes(), 0);
  EXPECT_EQ(held[0].values->size(), 3U);  // an operation that runs keeps what it writes to
}

TEST(ResidualStoreTest, RefusesToLoadWhatIsNotFinite) {
  ResidualStore store;
  EXPECT_THROW(store.load("weight", 0, 0, std::vector<float>{1.0f, std::numeric_limits<float>::infinity()}),
               std::invalid_argument);
  EXPECT_THROW(store.load("weight", 0, 0, std::vector<float>{std::numeric_limits<float>::quiet_NaN()}),
               std::invalid_argument);
  EXPECT_EQ(store.bytes(), 0);
}

}  // namespace
}  // namespace zeropg

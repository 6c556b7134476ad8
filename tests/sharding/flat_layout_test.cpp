// Offsets depend on the sizes alone, slices are equal, nothing overlaps.
#include "sharding/flat_layout.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

TEST(FlatLayout, OffsetsAreAlignedAndDoNotDependOnTheWorldSize) {
  const std::vector<int64_t> numels = {1, 32, 33, 0, 7, 1000};
  const FlatLayout alone = make_flat_layout(numels, 1);
  EXPECT_EQ(alone.offsets, (std::vector<int64_t>{0, 32, 64, 128, 128, 160}));
  for (int64_t world_size = 1; world_size <= 17; ++world_size) {
    const FlatLayout layout = make_flat_layout(numels, world_size);
    EXPECT_EQ(layout.offsets, alone.offsets);
    EXPECT_EQ(layout.total_numel, layout.shard_numel * world_size);
    EXPECT_EQ(layout.shard_numel % kAlignmentNumel, 0);
    EXPECT_GE(layout.total_numel, 1160);
    EXPECT_LT(layout.total_numel, 1160 + (world_size + 1) * kAlignmentNumel);
  }
}

TEST(FlatLayout, FewerElementsThanRanks) {
  const FlatLayout layout = make_flat_layout({3}, 8);
  EXPECT_EQ(layout.shard_numel, kAlignmentNumel);
  EXPECT_EQ(layout.total_numel, 8 * kAlignmentNumel);
}

TEST(FlatLayout, NothingTakesNoSpace) {
  EXPECT_EQ(make_flat_layout({}, 4).total_numel, 0);
  EXPECT_EQ(make_flat_layout({0, 0}, 4).total_numel, 0);
}

}  // namespace
}  // namespace zeropg

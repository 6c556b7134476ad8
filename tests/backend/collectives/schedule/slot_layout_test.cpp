// Parts of a chunk that a staging slot does not hold together go through it in groups.
#include "backend/collectives/schedule/slot_layout.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "tests/backend/collectives/collective_suite.h"

namespace zeropg {
namespace {

CollectiveSpec spec_of(int32_t nodes) {
  CollectiveSpec spec{.op = OpKind::kAllReduce, .rank = 2, .world_size = 2 * nodes};
  spec.nodes = nodes_of_sizes(std::vector<int32_t>(nodes, 2));
  return spec;
}

TEST(SlotLayoutTest, AChunkThatFitsLiesAsItIs) {
  const Placement placement(spec_of(3));
  const ChunkLayout layout = ChunkLayout::of_equal_parts(placement, 3 * 128, 64);
  const SlotLayout slots(placement, layout, 3 * 128);
  EXPECT_EQ(slots.group_count(), 1);
  EXPECT_EQ(slots.staged(4, 2, 300).offset_bytes, 300);
  EXPECT_EQ(slots.other_nodes(placement, 0), placement.other_nodes());
}

TEST(SlotLayoutTest, EveryPartIsInOneGroupBehindTheOwnNodeAndFitsTheSlot) {
  for (const int32_t nodes : {2, 3, 5, 8, 9}) {
    for (const int64_t slot_bytes : {128, 256, 400, 1000}) {
      const Placement placement(spec_of(nodes));
      const ChunkLayout layout = ChunkLayout::of_equal_parts(placement, nodes * 128, 64);
      const SlotLayout slots(placement, layout, slot_bytes);
      EXPECT_EQ(slots.group_count() % 2, 1);
      std::set<int32_t> seen;
      for (int32_t group = 0; group < slots.group_count(); ++group) {
        for (const int32_t part : slots.parts(group)) {
          EXPECT_TRUE(seen.insert(part).second);
          EXPECT_EQ(slots.group_of(part), group);
          const Region first = slots.staged(2, part, layout.part(part).offset_bytes);
          EXPECT_EQ(first.bank, group % 2);
          EXPECT_LE(first.offset_bytes + 128, std::max<int64_t>(slot_bytes, 128));
        }
      }
      EXPECT_EQ(seen.size(), static_cast<size_t>(nodes));
      const int32_t first = slots.group_count() == 1 ? 0 : (placement.node() + 1) % nodes;
      EXPECT_EQ(slots.parts(0).front(), first);
    }
  }
}

TEST(SlotLayoutTest, RefusesAPartThatASlotDoesNotHold) {
  EXPECT_THROW(group_count(4, 129, 128), std::invalid_argument);
  EXPECT_EQ(group_count(4, 128, 128), 5);
  EXPECT_EQ(group_count(4, 0, 128), 1);
}

}  // namespace
}  // namespace zeropg

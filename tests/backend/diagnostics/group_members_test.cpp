#include "backend/diagnostics/group_members.h"

#include <gtest/gtest.h>

#include <string>

namespace zeropg {
namespace {

std::string text(const std::vector<uint64_t>& ranks) { return describe_members(ranks); }

TEST(GroupMembers, TheWorldNeedsNoWords) {
  EXPECT_EQ(text({}), "");
  EXPECT_EQ(text({0}), "");
  EXPECT_EQ(text({0, 1, 2, 3}), "");
}

TEST(GroupMembers, FewAreListed) {
  EXPECT_EQ(text({3}), " of global rank 3");
  EXPECT_EQ(text({1, 3}), " of global ranks 1, 3");
  EXPECT_EQ(text({3, 1, 2, 0}), " of global ranks 3, 1, 2, 0");
  EXPECT_EQ(text({0, 0, 0, 0}), " of global ranks 0, 0, 0, 0");
}

TEST(GroupMembers, ManyAreARangeWhereTheyAreOne) {
  EXPECT_EQ(text({4, 5, 6, 7}), " of global ranks 4 to 7");
  EXPECT_EQ(text({0, 8, 16, 24, 32}), " of global ranks 0 to 32 by 8");
  std::vector<uint64_t> odd(100);
  for (size_t i = 0; i < odd.size(); ++i) odd[i] = i * i;
  const std::string listed = text(odd);
  EXPECT_EQ(listed.substr(0, 30), " of global ranks 0, 1, 4, 9, 1");
  EXPECT_EQ(listed.substr(listed.size() - 10), " 3969, ...");
}

TEST(GroupMembers, AreKept) { EXPECT_EQ(describe_members({7, 9}), describe_members({7, 9})); }

}  // namespace
}  // namespace zeropg

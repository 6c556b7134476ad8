// What stays whole and what comes ahead, of five units of 10 elements and a root of 4.
#include "sharding/units/unit_budget.h"

#include <gtest/gtest.h>

#include <vector>

namespace zeropg {
namespace {

using Units = UnitBudget::Units;

constexpr int64_t kRoot = 5;
const std::vector<int64_t> kNumels = {10, 10, 10, 10, 10, 4};

// The units that a forward of all leaves kept.
Units kept_after_forward(UnitBudget& budget) {
  budget.begin_forward(kRoot);
  EXPECT_EQ(budget.need(kRoot), Units{});
  Units kept;
  const auto forget = [&](const Units& gone) {
    for (const int64_t unit : gone) {
      std::erase(kept, unit);
    }
  };
  for (int64_t unit = 0; unit < kRoot; ++unit) {
    forget(budget.need(unit));
    budget.begin_forward(unit);
    budget.end_forward(unit);
    kept.push_back(unit);
    forget(budget.keep(unit));
    for (int64_t other = 0; other < kRoot; ++other) {
      EXPECT_EQ(budget.is_kept(other), std::ranges::find(kept, other) != kept.end());
    }
  }
  budget.end_forward(kRoot);
  return kept;
}

TEST(UnitBudget, KeepsTheLastUnitsOfAForward) {
  const std::vector<Units> wanted = {{}, {}, {4}, {4}, {3, 4}, {0, 1, 2, 3, 4}};
  const std::vector<int64_t> keep_numels = {0, 9, 10, 19, 20, 1000};
  for (size_t i = 0; i < wanted.size(); ++i) {
    UnitBudget budget(kNumels, {.keep_numel = keep_numels[i]});
    EXPECT_EQ(kept_after_forward(budget), wanted[i]);
    EXPECT_EQ(budget.drop_kept(), wanted[i]);
    EXPECT_EQ(budget.drop_kept(), Units{});
  }
}

TEST(UnitBudget, DoesNotKeepALargeUnitInPlaceOfOthers) {
  UnitBudget budget({10, 10, 30, 4}, {.keep_numel = 20});
  EXPECT_EQ(budget.keep(0), Units{});
  EXPECT_EQ(budget.keep(1), Units{});
  EXPECT_EQ(budget.keep(2), Units{2});
  EXPECT_TRUE(budget.is_kept(0) && budget.is_kept(1));
  UnitBudget bounded({10, 10, 30, 4}, {.keep_numel = 1000, .max_whole_numel = 30});
  EXPECT_EQ(bounded.keep(0), Units{});
  EXPECT_EQ(bounded.keep(1), Units{});
  EXPECT_EQ(bounded.keep(2), Units{2});
  EXPECT_TRUE(bounded.is_kept(0) && bounded.is_kept(1));
}

TEST(UnitBudget, TakesWhatIsNeededFromWhatIsKept) {
  UnitBudget budget(kNumels, {.keep_numel = 20});
  kept_after_forward(budget);
  EXPECT_EQ(budget.need(4), Units{});
  EXPECT_FALSE(budget.is_kept(4));
  EXPECT_TRUE(budget.is_kept(3));
  budget.forget_kept(3);
  EXPECT_FALSE(budget.is_kept(3));
}

TEST(UnitBudget, KeepsAgainWhatIsUsedTwice) {
  UnitBudget budget(kNumels, {.keep_numel = 20});
  EXPECT_EQ(budget.keep(0), Units{});
  EXPECT_EQ(budget.keep(1), Units{});
  EXPECT_EQ(budget.need(0), Units{});
  EXPECT_EQ(budget.keep(0), Units{});
  EXPECT_EQ(budget.keep(2), Units{1});
}

TEST(UnitBudget, GathersAheadOneUnitAndMoreWithinALimit) {
  UnitBudget none(kNumels, {.prefetch_numel = 0});
  EXPECT_FALSE(none.may_gather_ahead(0));
  UnitBudget budget(kNumels, {.prefetch_numel = 20});
  for (int64_t unit = 0; unit < 2; ++unit) {
    EXPECT_TRUE(budget.may_gather_ahead(unit));
    EXPECT_EQ(budget.gather_ahead(unit), Units{});
  }
  EXPECT_FALSE(budget.may_gather_ahead(2));
  EXPECT_EQ(budget.need(0), Units{});
  EXPECT_FALSE(budget.is_ahead(0));
  EXPECT_TRUE(budget.may_gather_ahead(2));
  budget.drop_ahead();
  EXPECT_FALSE(budget.is_ahead(1));
  UnitBudget small(kNumels, {.prefetch_numel = 1});
  EXPECT_TRUE(small.may_gather_ahead(0));
}

TEST(UnitBudget, HoldsAllTogetherWithinALimit) {
  UnitBudget budget(kNumels, {.keep_numel = 1000, .max_whole_numel = 34});
  EXPECT_EQ(kept_after_forward(budget), (Units{2, 3, 4}));
  EXPECT_EQ(budget.need(4), Units{});
  EXPECT_TRUE(budget.may_gather_ahead(1)) << "in place of what is kept";
  EXPECT_EQ(budget.gather_ahead(1), Units{2});
  EXPECT_EQ(budget.gather_ahead(0), Units{3});
  EXPECT_FALSE(budget.may_gather_ahead(2));
}

TEST(UnitBudget, CountsWhatRunsInSomethingElse) {
  UnitBudget budget(kNumels, {.keep_numel = 1000, .max_whole_numel = 34});
  budget.begin_forward(0);
  EXPECT_EQ(budget.keep(1), Units{});
  EXPECT_EQ(budget.keep(2), Units{});
  EXPECT_EQ(budget.keep(3), Units{1});
  budget.begin_forward(kRoot);  // that one had raised
  EXPECT_EQ(budget.keep(1), Units{});
}

TEST(UnitBudget, AlwaysAllowsWhatIsNeeded) {
  for (const int64_t max_whole_numel : {0, 13}) {
    UnitBudget budget(kNumels, {.keep_numel = 1000, .max_whole_numel = max_whole_numel});
    EXPECT_EQ(kept_after_forward(budget), Units{});
    EXPECT_EQ(budget.need(4), Units{});
    EXPECT_FALSE(budget.may_gather_ahead(3));
  }
}

TEST(UnitBudget, SaysWhatPersists) {
  const std::vector<int64_t> numels = {3, 10, 3, 0, 3, 4};
  const auto which = [&](const UnitLimits& limits) {
    Units persistent;
    const UnitBudget budget(numels, limits);
    for (int64_t unit = 0; unit <= kRoot; ++unit) {
      if (budget.persists(unit)) {
        persistent.push_back(unit);
      }
    }
    return persistent;
  };
  EXPECT_EQ(which({}), Units{});
  EXPECT_EQ(which({.persistent_numel = 3}), (Units{0, 2, 4}));
  EXPECT_EQ(which({.persistent_numel = 4}), (Units{0, 2, 4, 5}));
  EXPECT_EQ(which({.persistent_numel = 3, .max_whole_numel = 10}), (Units{0, 2})) << "beside the root";
  UnitBudget budget(numels, {.keep_numel = 100, .persistent_numel = 3, .max_whole_numel = 23});
  EXPECT_EQ(budget.keep(1), Units{});
  UnitBudget smaller(numels, {.keep_numel = 100, .persistent_numel = 3, .max_whole_numel = 22});
  EXPECT_EQ(smaller.keep(1), Units{1});
}

}  // namespace
}  // namespace zeropg

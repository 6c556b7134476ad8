// What comes next is what last came there, and a step that differs changes nothing else.
#include "sharding/module/unit_forecast.h"

#include <gtest/gtest.h>

#include <vector>

namespace zeropg {
namespace {

using Units = std::vector<int64_t>;

void pass(UnitForecast& forecast, const Units& units) {
  for (const int64_t unit : units) {
    forecast.add(unit);
  }
  forecast.end();
}

// What is expected after each unit of a pass.
Units expected_in(UnitForecast& forecast, const Units& units) {
  Units expected;
  for (const int64_t unit : units) {
    forecast.add(unit);
    expected.push_back(forecast.next());
  }
  forecast.end();
  return expected;
}

constexpr int64_t kNone = UnitForecast::kNone;

TEST(UnitForecast, ExpectsNothingBeforeRanksAgree) {
  UnitForecast forecast;
  pass(forecast, {9, 0, 1, 1, 0});
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{kNone, kNone, kNone, kNone, kNone}));
  forecast.forget();
  forecast.learn();
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{kNone, kNone, kNone, kNone, kNone}));
  forecast.learn();
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{0, 1, 1, 0, kNone}));
}

TEST(UnitForecast, RepairsWhatDiffered) {
  UnitForecast forecast;
  pass(forecast, {9, 0, 1, 2, 3, 3, 2, 1, 0});
  forecast.learn();
  EXPECT_EQ(expected_in(forecast, {9, 0, 2, 3, 3, 2, 0}), (Units{0, 1, kNone, 3, 2, 1, kNone}));
  forecast.learn();
  EXPECT_EQ(expected_in(forecast, {9, 0, 2, 3, 3, 2, 0}), (Units{0, 2, 3, 3, 2, 0, kNone}));
}

TEST(UnitForecast, EndsOnce) {
  UnitForecast forecast;
  EXPECT_FALSE(forecast.end());
  forecast.add(1);
  EXPECT_TRUE(forecast.end());
  EXPECT_FALSE(forecast.end());
}

}  // namespace
}  // namespace zeropg

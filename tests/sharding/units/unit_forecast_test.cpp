// What comes next is what last came there, and a step that differs changes nothing else.
#include "sharding/units/unit_forecast.h"

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
    expected.push_back(forecast.next(forecast.place()));
  }
  forecast.end();
  return expected;
}

constexpr int64_t kNone = UnitForecast::kNone;

TEST(UnitForecast, ExpectsWhatItHasSeen) {
  UnitForecast forecast;
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{kNone, kNone, kNone, kNone, kNone}));
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{0, 1, 1, 0, kNone}));
  forecast.forget();
  EXPECT_EQ(expected_in(forecast, {9, 0, 1, 1, 0}), (Units{kNone, kNone, kNone, kNone, kNone}));
}

TEST(UnitForecast, RepairsWhatDiffered) {
  UnitForecast forecast;
  pass(forecast, {9, 0, 1, 2, 3, 3, 2, 1, 0});
  EXPECT_EQ(expected_in(forecast, {9, 0, 2, 3, 3, 2, 0}), (Units{0, 1, kNone, 3, 2, 1, kNone}));
  EXPECT_EQ(expected_in(forecast, {9, 0, 2, 3, 3, 2, 0}), (Units{0, 2, 3, 3, 2, 0, kNone}));
}

TEST(UnitForecast, ExpectsNoBackwardAfterAPassWithoutOne) {
  UnitForecast forecast;
  pass(forecast, {9, 0, 1, 1, 0});
  EXPECT_EQ(expected_in(forecast, {9, 0, 1}), (Units{0, 1, 1}));
  EXPECT_EQ(expected_in(forecast, {9, 0, 1}), (Units{0, 1, kNone}));
}

TEST(UnitForecast, EndsOnce) {
  UnitForecast forecast;
  pass(forecast, {1, 2});
  forecast.end();
  EXPECT_EQ(expected_in(forecast, {1, 2}), (Units{2, kNone}));
}

}  // namespace
}  // namespace zeropg

#include "backend/diagnostics/pause_detector.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

using std::chrono::milliseconds;

PauseDetector::TimePoint at(int ms) { return PauseDetector::TimePoint{} + std::chrono::hours(1) + milliseconds(ms); }

TEST(PauseDetector, DeadlinesCountWhereNobodyWasAway) {
  PauseDetector watch;
  for (int now = 50; now < 10'000; now += 50) EXPECT_TRUE(watch.may_blame(at(now), at(0))) << now;
}

TEST(PauseDetector, AfterAnAbsenceThePeersHaveSomeTime) {
  PauseDetector watch;
  EXPECT_TRUE(watch.may_blame(at(50), at(0)));
  for (int now = 5'000; now < 7'000; now += 50) EXPECT_FALSE(watch.may_blame(at(now), at(0))) << now;
  EXPECT_TRUE(watch.may_blame(at(7'000), at(0)));
}

TEST(PauseDetector, IdlenessIsNoAbsence) {
  PauseDetector watch;
  EXPECT_TRUE(watch.may_blame(at(50), at(0)));
  EXPECT_TRUE(watch.may_blame(at(60'050), at(60'000)));
}

}  // namespace
}  // namespace zeropg

#include "backend/diagnostics/notices.h"

#include <gtest/gtest.h>

#include <thread>

namespace zeropg {
namespace {

int rings = 0;

TEST(Notices, GoToStderrOncePerKindWhenNobodyListens) {
  testing::internal::CaptureStderr();
  notice("a", "first line");
  notice("a", "the same again");
  notice("b", "second line");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "first line\nsecond line\n");
}

TEST(Notices, WaitForTheListenerWhoseBellRings) {
  set_notice_bell([] { ++rings; });
  testing::internal::CaptureStderr();
  std::thread([] { notice("c", "from another thread"); }).join();
  notice("c", "the same again");
  EXPECT_EQ(rings, 1);
  EXPECT_EQ(take_notices(), std::vector<std::string>{"from another thread"});
  EXPECT_TRUE(take_notices().empty());
  notice("d", "left behind");
  set_notice_bell(nullptr);
  notice("e", "after the listener");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "left behind\nafter the listener\n");
}

}  // namespace
}  // namespace zeropg

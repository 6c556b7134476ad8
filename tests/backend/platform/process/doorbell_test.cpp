#include "backend/platform/process/doorbell.h"

#include <gtest/gtest.h>

#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

TEST(Doorbell, IsOnePerProcess) { EXPECT_EQ(process_doorbell(), process_doorbell()); }

TEST(Doorbell, IsSilencedByTheWait) {
  ring_doorbell(process_doorbell());
  ring_doorbell(process_doorbell());
  EXPECT_TRUE(wait_doorbell(process_doorbell(), milliseconds(0)));
  EXPECT_FALSE(wait_doorbell(process_doorbell(), milliseconds(1)));
}

TEST(Doorbell, ForkedChildHasItsOwn) {
  ring_doorbell(process_doorbell());
  ChildProcess child([] {
    const bool stole_the_parents = wait_doorbell(process_doorbell(), milliseconds(0));
    ring_doorbell(process_doorbell());
    return !stole_the_parents && wait_doorbell(process_doorbell(), milliseconds(0));
  });
  EXPECT_TRUE(child.succeeded());
  EXPECT_TRUE(wait_doorbell(process_doorbell(), milliseconds(0)));
}

TEST(Doorbell, RingingNeverBlocks) {
  for (int i = 0; i < 100000; ++i) ring_doorbell(process_doorbell());
  ring_doorbell(-1);
  EXPECT_TRUE(wait_doorbell(process_doorbell(), milliseconds(0)));
}

}  // namespace
}  // namespace zeropg

#include "backend/collectives/schedule/staging_stores.h"

#include <gtest/gtest.h>

namespace zeropg {
namespace {

TEST(StagingStoresTest, FewBytesGoThroughTheCaches) {
  EXPECT_FALSE(should_stream_to_staging(0));
  EXPECT_FALSE(should_stream_to_staging(4096));
  EXPECT_EQ(should_stream_to_staging(8192), should_stream_to_staging(1 << 20));  // then it is the processor that counts
}

}  // namespace
}  // namespace zeropg

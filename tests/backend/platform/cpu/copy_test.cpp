#include "backend/platform/cpu/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace zeropg {
namespace {

TEST(CopyTest, CopiesAnyLengthAtAnyAlignmentAndNothingElse) {
  std::vector<unsigned char> source(1000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 31 + 1);
  for (const bool is_streaming : {false, true}) {
    for (const size_t bytes : {0, 1, 63, 64, 127, 128, 129, 191, 700}) {
      for (const size_t to : {0, 1, 17, 63, 64}) {
        for (const size_t from : {0, 5, 64}) {
          std::vector<unsigned char> destination(1000, 0xee);
          std::vector<unsigned char> wanted = destination;
          std::copy_n(source.begin() + from, bytes, wanted.begin() + to);
          copy_bytes(destination.data() + to, source.data() + from, static_cast<int64_t>(bytes), is_streaming);
          ASSERT_EQ(destination, wanted) << bytes << " bytes from " << from << " to " << to;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeropg

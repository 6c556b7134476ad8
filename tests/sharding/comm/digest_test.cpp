// The digest that ranks compare: every byte and its place count, and the value is fixed for all processors.
#include "sharding/comm/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace zeropg {
namespace {

std::vector<std::byte> counting(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + 3);
  }
  return bytes;
}

TEST(Digest, SeesEveryBit) {
  for (const size_t size : {1, 7, 8, 9, 31, 32, 33, 64, 257}) {
    std::vector<std::byte> bytes = counting(size);
    std::set<uint64_t> seen = {digest(bytes)};
    for (size_t bit = 0; bit < size * 8; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_TRUE(seen.insert(digest(bytes)).second) << "bit " << bit << " of " << size << " bytes";
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

TEST(Digest, SeesLengthOrderAndSeed) {
  std::set<uint64_t> seen;
  for (size_t size = 0; size < 300; ++size) {
    EXPECT_TRUE(seen.insert(digest(std::vector<std::byte>(size))).second) << size << " zeros";
  }
  std::vector<std::byte> bytes = counting(256);
  for (size_t first = 0; first < 256; first += 8) {
    std::vector<std::byte> swapped = bytes;
    std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + first);
    EXPECT_EQ(digest(swapped) == digest(bytes), first == 0) << "words 0 and " << first / 8 << " swapped";
  }
  EXPECT_NE(digest(bytes, 1), digest(bytes, 2));
}

}  // namespace
}  // namespace zeropg

// CRC-32C: published values, the same from every kernel, and joining.
#include "sharding/checkpoint/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

namespace zeropg {
namespace {

std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::vector<std::byte> random_bytes(size_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Bit by bit, as the definition has it.
uint32_t slow_crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

TEST(Crc32c, HasThePublishedValues) {
  // RFC 3720, B.4.
  EXPECT_EQ(crc32c(as_bytes("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0})), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Crc32c, IsTheSameFromEveryKernel) {
  const std::vector<std::byte> bytes = random_bytes(12 * 4096 * 3 + 1003);
  for (const Crc32cKernel& kernel : usable_crc32c()) {
    SCOPED_TRACE(kernel.name);
    for (size_t count = 0; count < 1700; count += count < 40 ? 1 : 7) {
      for (const size_t begin : {0, 1, 24}) {
        const auto some = std::span(bytes).subspan(begin, count);
        ASSERT_EQ(kernel.extend(some, 7), slow_crc32c(some, 7)) << begin << " " << count;
      }
    }
    for (const size_t begin : {0, 1, 4096, 12289}) {
      for (const size_t end :
           {size_t{12288}, size_t{12296}, size_t{24575}, size_t{24577}, size_t{65472}, bytes.size()}) {
        const auto some = std::span(bytes).subspan(std::min(begin, end), end - std::min(begin, end));
        EXPECT_EQ(kernel.extend(some, 0xffffffff), slow_crc32c(some, 0xffffffff));
      }
    }
  }
}

TEST(Crc32c, OfTwoPartsIsJoined) {
  const std::vector<std::byte> bytes = random_bytes(1003);
  const uint32_t whole = crc32c(bytes);
  for (const size_t cut : {0, 1, 8, 500, 1002, 1003}) {
    const auto first = std::span(bytes).first(cut), second = std::span(bytes).subspan(cut);
    EXPECT_EQ(crc32c(second, crc32c(first)), whole);
    EXPECT_EQ(join_crc32c(crc32c(first), crc32c(second), second.size()), whole);
  }
}

}  // namespace
}  // namespace zeropg

#include "compression/selective/elias_gamma.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace zeropg {
namespace {

std::vector<std::byte> written(const std::vector<uint32_t>& numbers, int order) {
  int64_t bits = 0;
  for (const uint32_t number : numbers) bits += gamma_bits(number, order);
  std::vector<std::byte> bytes(static_cast<size_t>((bits + 7) / 8) + 1, std::byte{0x5a});
  GammaWriter writer(bytes.data());
  for (const uint32_t number : numbers) writer.write(number, order);
  EXPECT_EQ(writer.finish(), &bytes.back()) << "gamma_bits is not what it wrote";
  EXPECT_EQ(bytes.back(), std::byte{0x5a}) << "it wrote beyond its end";
  bytes.pop_back();
  return bytes;
}

std::vector<uint32_t> numbers_of_every_width(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> numbers = {1, 1, 2, 3, 4, 7, 8, 0x7fffffff, kLargestGammaNumber, kLargestGammaNumber, 1};
  for (int i = 0; i < 3000; ++i) numbers.push_back(std::max<uint32_t>(random() >> (1 + random() % 31), 1));
  return numbers;
}

TEST(EliasGammaTest, ReadsWhatItHasWrittenInEveryOrder) {
  for (int order = 0; order <= kLargestGammaOrder; ++order) {
    const std::vector<uint32_t> numbers = numbers_of_every_width(static_cast<uint32_t>(order));
    const std::vector<std::byte> bytes = written(numbers, order);
    GammaReader reader(bytes);
    for (const uint32_t number : numbers) ASSERT_EQ(reader.read(order), number) << "order " << order;
    EXPECT_TRUE(reader.is_at_end());
  }
}

TEST(EliasGammaTest, WritesTheBitsOfTheReadme) {
  // From the lowest bit up. 1: 1. 5: 00 1 10. 2: 0 1 0.
  EXPECT_EQ(written({1, 5, 2}, 0), (std::vector<std::byte>{std::byte{0b10'01'1001}, std::byte{0}}));
  // Order 2, 7: (7 - 1) / 4 + 1 = 2, so 0 1 0, and 6 % 4 = 2: 01.
  EXPECT_EQ(written({7}, 2), (std::vector<std::byte>{std::byte{0b10'010}}));
  EXPECT_EQ(gamma_bits(1, 0), 1);
  EXPECT_EQ(gamma_bits(kLargestGammaNumber, 0), 63);
  EXPECT_EQ(gamma_bits(kLargestGammaNumber, 31), 32);
}

TEST(EliasGammaTest, RefusesWhatEndsBeforeItsCode) {
  for (const int order : {0, 5, 31}) {
    for (const uint32_t number : {1U, 100U, kLargestGammaNumber}) {
      const std::vector<std::byte> bytes = written({number}, order);
      for (size_t length = 0; length < bytes.size(); ++length) {
        EXPECT_EQ(GammaReader(std::span(bytes).first(length)).read(order), 0U) << number << " in " << length;
      }
    }
  }
}

TEST(EliasGammaTest, RefusesNumbersBeyond32Bits) {
  const std::vector<std::byte> zeros(40);
  EXPECT_EQ(GammaReader(zeros).read(0), 0U);
  std::vector<std::byte> wide(40, std::byte{0xff});
  wide[0] = wide[1] = wide[2] = wide[3] = std::byte{0};  // 32 zeros, so 33 bits
  EXPECT_EQ(GammaReader(wide).read(0), 0U);
  wide[3] = std::byte{0x80};  // 31 zeros
  EXPECT_EQ(GammaReader(wide).read(0), 0xffffffffU);
  EXPECT_EQ(GammaReader(wide).read(1), 0U);
}

TEST(EliasGammaTest, SeesWhatIsLeftAtTheEnd) {
  const std::vector<std::byte> bytes = {std::byte{0b0000'0001}, std::byte{0}};
  GammaReader short_one({bytes.data(), 1});
  EXPECT_EQ(short_one.read(0), 1U);
  EXPECT_TRUE(short_one.is_at_end());
  GammaReader byte_too_many(bytes);
  EXPECT_EQ(byte_too_many.read(0), 1U);
  EXPECT_FALSE(byte_too_many.is_at_end());
  const std::byte ones{0b0000'0011};
  GammaReader bit_too_many({&ones, 1});
  EXPECT_EQ(bit_too_many.read(0), 1U);
  EXPECT_FALSE(bit_too_many.is_at_end());
}

}  // namespace
}  // namespace zeropg

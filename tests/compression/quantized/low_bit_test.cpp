#include "compression/quantized/low_bit.h"

#include "tests/compression/compressor_suite.h"
#include "tests/compression/same_bits.h"

namespace zeropg {
namespace {

// One outlier of 1e4 among a thousand values of 1 is all that a sign can lose.
const std::vector<CompressorCase> kCases = {
    {.label = "OneBit",
     .name = "one_bit",
     .largest_bytes_per_value = 0.128,
     .contraction = 0.9995,
     .keeps_zeros = false},
    {.label = "OneBitBlock64",
     .name = "one_bit",
     .parameters = {{"block", 64}},
     .largest_bytes_per_value = 0.157,
     .contraction = 0.99,
     .keeps_zeros = false},
    {.label = "OneBitRotated",
     .name = "one_bit",
     .parameters = {{"rotate", 1}},
     .largest_bytes_per_value = 0.128,
     .contraction = 0.9995,
     .keeps_zeros = false,
     .is_idempotent = false},
    {.label = "TwoBit", .name = "two_bit", .largest_bytes_per_value = 0.253, .contraction = 0.9},
    {.label = "TwoBitRotated",
     .name = "two_bit",
     .parameters = {{"rotate", 1}},
     .largest_bytes_per_value = 0.253,
     .contraction = 0.9995,
     .keeps_zeros = false,
     .is_idempotent = false},
};
INSTANTIATE_TEST_SUITE_P(LowBit, CompressorSuite, testing::ValuesIn(kCases), case_name);

constexpr LowBitCode kCodes[] = {LowBitCode::kSign, LowBitCode::kRotatedSign, LowBitCode::kTernary,
                                 LowBitCode::kRotatedFourLevel};

std::vector<float> mostly_finite_floats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = random();
    if (i / 4096 % 3 != 2) bits = (bits & 0x807fffff) | ((100 + bits % 40) << 23);  // mostly finite
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

TEST(LowBitTest, EveryInstructionSetGivesTheSameBits) {
  for (const LowBitCode code : kCodes) {
    for (const int64_t block : {64, 1024, 4096}) {
      const LowBit portable(code, block, usable_low_bit_sets().front());
      for (const LowBitSet& set : usable_low_bit_sets()) {
        const LowBit other(code, block, set);
        for (const size_t size : {1, 7, 31, 33, 255, 256, 300, 1000, 9001}) {
          SCOPED_TRACE(std::string(set.name) + " " + other.description() + " size " + std::to_string(size));
          expect_same_bits(portable, other, mostly_finite_floats(size, static_cast<uint32_t>(size)),
                           mostly_finite_floats(size, 5));
        }
      }
    }
  }
}

TEST(LowBitTest, HasTheFormatThatTheReadmeGives) {
  // Mean magnitude 2 as a bfloat16; then signs of values 0, 2, 4 and of 1, 3, 5 in two bytes.
  const std::vector<float> values = {1.0f, -3.0f, 2.0f, -2.0f, 1.0f, 3.0f, -2.0f, -2.0f, 2.0f, 2.0f};
  std::vector<std::byte> encoded(4);
  LowBit(LowBitCode::kSign, 64).encode(values, {}, encoded);
  // Byte j holds value j + 2 b in bit b.
  const std::vector<uint8_t> signs = {0x00, 0x40, 0b01000, 0b01011};
  EXPECT_EQ(std::memcmp(encoded.data(), signs.data(), 4), 0);
  // Threshold 0.7 * 2.5; the mean of 3, 3 and 4, as a bfloat16 3.328125; codes 0, 1 and 3 for minus.
  const std::vector<float> few = {3.0f, 0.0f, -3.0f, 4.0f};
  std::vector<std::byte> ternary(3);
  LowBit(LowBitCode::kTernary, 64).encode(few, {}, ternary);
  const std::vector<uint8_t> codes = {0x55, 0x40, 0b01'11'00'01};
  EXPECT_EQ(std::memcmp(ternary.data(), codes.data(), 3), 0);
}

// What rotation is for: a large value that signs would drain one scale at a time.
TEST(LowBitTest, ResidualsStaySmallWithRotation) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto residual_norm = [&](LowBitCode code) {
    const LowBit codec(code, 1024);
    std::vector<float> residual(1024, 0.0f);
    std::vector<std::byte> encoded(codec.capacity_bytes(1024));
    double given = 0;
    for (int step = 0; step < 200; ++step) {
      std::vector<float> values(1024);
      for (float& value : values) value = std::pow(normal(random), 5);
      codec.encode(values, residual, encoded);
      for (const float value : values) given += double{value} * value;
    }
    double norm = 0;
    for (const float value : residual) norm += double{value} * value;
    return norm / (given / 200);
  };
  EXPECT_LT(residual_norm(LowBitCode::kRotatedSign), 0.5 * residual_norm(LowBitCode::kSign));
  EXPECT_LT(residual_norm(LowBitCode::kRotatedFourLevel), 0.5);
}

}  // namespace
}  // namespace zeropg

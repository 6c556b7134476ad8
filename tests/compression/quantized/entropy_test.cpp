#include "compression/quantized/entropy.h"

#include "tests/compression/compressor_suite.h"

namespace zeropg {
namespace {

double bound4(double, double largest) { return std::max(0.503 * largest / 7, largest / 7 < 1.2e-38 ? largest : 0.0); }
double bound_bf16(double value, double) { return std::max(std::abs(value) * 0x1p-8, 0x1p-133); }

// Heavy-tailed values leave most codes near zero, which is what Huffman's code is for.
const std::vector<CompressorCase> kCases = {
    {"Int4", "block_quant", {{"bits", 4}, {"entropy", 1}}, 0.42, bound4},
    {.label = "TwoBit",
     .name = "two_bit",
     .parameters = {{"entropy", 1}},
     .largest_bytes_per_value = 0.22,
     .contraction = 0.9},
    {"Bf16", "bf16", {{"entropy", 1}}, 1.75, bound_bf16},
};
INSTANTIATE_TEST_SUITE_P(Entropy, CompressorSuite, testing::ValuesIn(kCases), case_name);

TEST(EntropyTest, SendsWhatCannotBePackedAsItIs) {
  const auto codec = make_compressor("bf16", {{"entropy", 1}});
  std::mt19937 random(1);
  std::vector<float> values(4096);
  for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(random()) & 0xbfffffffU);
  std::vector<std::byte> encoded(codec->capacity_bytes(4096));
  EXPECT_EQ(codec->encode(values, {}, encoded), codec->capacity_bytes(4096));
  EXPECT_EQ(encoded[0], std::byte{0});
}

TEST(EntropyTest, IsRefusedForSigns) {
  EXPECT_THROW(make_compressor("one_bit", {{"entropy", 1}}), std::invalid_argument);
}

}  // namespace
}  // namespace zeropg

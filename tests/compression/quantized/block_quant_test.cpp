#include "compression/quantized/block_quant.h"

#include "tests/compression/any_floats.h"
#include "tests/compression/compressor_suite.h"
#include "tests/compression/same_bits.h"

namespace zeropg {
namespace {

// Half a scale, which is largest / levels rounded to 8 bits of mantissa; scales below fp32's normal range become zero.
template <int kLevels>
double bound(double, double largest) {
  return std::max(0.503 * largest / kLevels, largest / kLevels < 1.2e-38 ? largest : 0.0);
}

const std::vector<CompressorCase> kCases = {
    {"Int8", "block_quant", {}, 1.01, bound<127>},
    {"Int4", "block_quant", {{"bits", 4}}, 0.51, bound<7>},
    {"Int8Block32", "block_quant", {{"block", 32}}, 1.07, bound<127>},
    {"Int4Block4096", "block_quant", {{"bits", 4}, {"block", 4096}}, 0.501, bound<7>},
};
INSTANTIATE_TEST_SUITE_P(BlockQuant, CompressorSuite, testing::ValuesIn(kCases), case_name);

TEST(BlockQuantTest, EveryInstructionSetGivesTheSameBits) {
  for (const int64_t bits : {4, 8}) {
    for (const int64_t block : {32, 96, 256, 4096}) {
      const BlockQuant portable(bits, block, usable_block_quant_sets().front());
      for (const BlockQuantSet& set : usable_block_quant_sets()) {
        const BlockQuant other(bits, block, set);
        for (const size_t size : {1, 7, 31, 33, 255, 256, 300, 1000, 9001}) {
          SCOPED_TRACE(std::string(set.name) + " bits " + std::to_string(bits) + " block " + std::to_string(block) +
                       " size " + std::to_string(size));
          expect_same_bits(portable, other, any_floats(size, static_cast<uint32_t>(size)), any_floats(size, 5));
        }
      }
    }
  }
}

TEST(BlockQuantTest, HasTheFormatThatTheReadmeGives) {
  const std::vector<float> values = {7.0f, -1.0f, 2.0f, -3.4f, 0.0f};
  std::vector<std::byte> encoded(5);
  BlockQuant(4, 32).encode(values, {}, encoded);
  // Scale 1.0 as a bfloat16; then elements 0 and 3, 1 and 4, 2 and nothing.
  const std::vector<uint8_t> wanted = {0x80, 0x3f, 0xd7, 0x0f, 0x02};
  EXPECT_EQ(std::memcmp(encoded.data(), wanted.data(), 5), 0);
  EXPECT_EQ(BlockQuant(4, 256).capacity_bytes(1024), 4 * 130);
  EXPECT_EQ(BlockQuant(8, 256).capacity_bytes(257), 258 + 3);
}

TEST(BlockQuantTest, CountsABlockAsInfiniteWhereItsLargestCodeWouldBe) {
  const std::vector<float> values(40, std::numeric_limits<float>::max());
  for (const int64_t bits : {4, 8}) {
    const BlockQuant codec(bits, 32);
    std::vector<std::byte> encoded(codec.capacity_bytes(40));
    std::vector<float> decoded(40), residual(40, 1.0f);
    codec.encode(values, residual, encoded);
    codec.decode(encoded, decoded);
    for (int i = 0; i < 40; ++i) {
      EXPECT_TRUE(std::isnan(decoded[i]) || (std::abs(decoded[i] - values[i]) < values[i] / 100)) << decoded[i];
      EXPECT_TRUE(std::isfinite(residual[i]));
    }
  }
}

TEST(RegistryTest, RefusesWhatItDoesNotKnow) {
  const auto message = [](const std::string& name, const CompressorParameters& parameters) -> std::string {
    try {
      make_compressor(name, parameters);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_NE(message("gzip", {}).find("expected one of block_quant"), std::string::npos);
  EXPECT_NE(message("block_quant", {{"bits", 5}}).find("expected 4 or 8"), std::string::npos);
  EXPECT_NE(message("block_quant", {{"bits", 4.5}}).find("expected an integer"), std::string::npos);
  EXPECT_NE(message("block_quant", {{"block", 100}}).find("a multiple of 32"), std::string::npos);
  EXPECT_NE(message("block_quant", {{"block", 8192}}).find("up to 4096"), std::string::npos);
  EXPECT_NE(message("block_quant", {{"ratio", 0.1}}).find("no parameter 'ratio'"), std::string::npos);
}

}  // namespace
}  // namespace zeropg

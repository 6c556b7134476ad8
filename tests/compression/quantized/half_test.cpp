#include "compression/quantized/half.h"

#include "tests/compression/compressor_suite.h"
#include "tests/compression/same_bits.h"

namespace zeropg {
namespace {

// Half a unit in the last of 11 bits, or of a subnormal.
double bound_float16(double value, double) { return std::max(std::abs(value) * 0x1p-11, 0x1p-25); }
double bound_bfloat16(double value, double) { return std::abs(value) * 0x1p-8 + 1e-40; }

const std::vector<CompressorCase> kCases = {{"Fp16", "fp16", {}, 2.0, bound_float16},
                                            {"Bf16", "bf16", {}, 2.0, bound_bfloat16}};
INSTANTIATE_TEST_SUITE_P(Half, CompressorSuite, testing::ValuesIn(kCases), case_name);

constexpr HalfFormat kFormats[] = {HalfFormat::kBfloat16, HalfFormat::kBfloat16Planes, HalfFormat::kFloat16};

std::vector<float> floats_of(const Half& codec, const std::vector<uint16_t>& halves) {
  std::vector<float> values(halves.size());
  codec.decode(std::as_bytes(std::span(halves)), values);
  return values;
}

std::vector<uint16_t> halves_of(const Half& codec, const std::vector<float>& values) {
  std::vector<uint16_t> halves(values.size());
  codec.encode(values, {}, std::as_writable_bytes(std::span(halves)));
  return halves;
}

std::vector<uint16_t> all_halves() {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  return halves;
}

// The IEEE meaning of 16 bits, of which `fraction` are of the fraction.
double meaning_of(uint16_t half, int fraction) {
  const int width = 15 - fraction;
  const int exponent = half >> fraction & ((1 << width) - 1);
  const double significand = (half & ((1 << fraction) - 1)) * std::exp2(-fraction);
  const int bias = (1 << (width - 1)) - 1;
  const double magnitude =
      exponent == (1 << width) - 1
          ? (significand == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN())
          : std::ldexp(significand + (exponent != 0), std::max(exponent, 1) - bias);
  return half >> 15 != 0 ? -magnitude : magnitude;
}

TEST(HalfTest, EveryHalfMeansWhatIeeeSaysAndComesBack) {
  const std::vector<uint16_t> halves = all_halves();
  for (const HalfFormat format : {HalfFormat::kBfloat16, HalfFormat::kFloat16}) {
    const Half codec(format);
    const std::vector<float> values = floats_of(codec, halves);
    const std::vector<uint16_t> back = halves_of(codec, values);
    for (size_t i = 0; i < halves.size(); ++i) {
      const double wanted = meaning_of(halves[i], format == HalfFormat::kFloat16 ? 10 : 7);
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(values[i])) << i;
        ASSERT_EQ(back[i], format == HalfFormat::kFloat16 ? 0x7e00 : 0x7fc0) << i;
      } else {
        ASSERT_EQ(values[i], wanted) << i;
        ASSERT_EQ(back[i], halves[i]) << i;
      }
    }
  }
}

TEST(HalfTest, WhatLiesBetweenTwoHalvesGoesToTheNearestAndFromTheMiddleToTheEvenOne) {
  for (const HalfFormat format : {HalfFormat::kBfloat16, HalfFormat::kFloat16}) {
    const Half codec(format);
    const uint16_t infinity = format == HalfFormat::kFloat16 ? 0x7c00 : 0x7f80;
    for (uint16_t half = 0; half + 1 < infinity; ++half) {
      const std::vector<float> ends = floats_of(codec, {half, static_cast<uint16_t>(half + 1)});
      const float middle = ends[0] + (ends[1] - ends[0]) / 2;
      const std::vector<uint16_t> found =
          halves_of(codec, {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, ends[1] * 2)});
      ASSERT_EQ(found, (std::vector<uint16_t>{half, static_cast<uint16_t>(half + (half & 1)),
                                              static_cast<uint16_t>(half + 1)}))
          << half;
    }
  }
}

TEST(HalfTest, EveryInstructionSetGivesTheSameBits) {
  std::mt19937 random(3);
  for (const HalfFormat format : kFormats) {
    const Half portable(format, usable_half_sets().front());
    for (const HalfSet& set : usable_half_sets()) {
      const Half other(format, set);
      for (const size_t size : {1, 7, 31, 33, 256, 1000, 9001}) {
        SCOPED_TRACE(std::string(set.name) + " " + other.description() + " size " + std::to_string(size));
        std::vector<float> values(size);
        for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(random()));
        expect_same_bits(portable, other, values, std::vector<float>(size, 0.3f));
      }
    }
  }
}

}  // namespace
}  // namespace zeropg

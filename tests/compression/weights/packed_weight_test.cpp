#include "compression/weights/packed_weight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "compression/quantized/block_quant.h"
#include "compression/quantized/half.h"
#include "compression/weights/nf4_levels.h"
#include "tests/compression/any_floats.h"

namespace zeropg {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kNf4, WeightFormat::kInt4, WeightFormat::kInt8};
constexpr WeightType kTypes[] = {WeightType::kFloat32, WeightType::kBfloat16, WeightType::kFloat16};

size_t bytes_of(WeightType type) { return type == WeightType::kFloat32 ? 4 : 2; }

std::vector<float> normal_floats(size_t count, float size) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<std::byte> pack(const PackedWeightShape& shape, std::span<const float> values,
                            const PackedWeightSet& set = usable_packed_weight_sets().back()) {
  std::vector<std::byte> packed(packed_weight_bytes(shape));
  pack_weight(shape, values, packed, set);
  return packed;
}

std::vector<std::byte> unpack(const PackedWeightShape& shape, std::span<const std::byte> packed, WeightType type,
                              const PackedWeightSet& set = usable_packed_weight_sets().back()) {
  std::vector<std::byte> values(shape.numel() * bytes_of(type));
  unpack_weight(shape, packed, 0, shape.numel(), type, values.data(), set);
  return values;
}

std::vector<float> floats(const PackedWeightShape& shape, std::span<const std::byte> packed) {
  const std::vector<std::byte> bytes = unpack(shape, packed, WeightType::kFloat32);
  std::vector<float> values(shape.numel());
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(PackedWeightTest, EveryInstructionSetGivesTheSameBits) {
  for (const WeightFormat format : kFormats) {
    for (const int64_t block : {32, 64, 96, 4096}) {
      for (const int64_t columns : {1, 7, 31, 33, 64, 191, 300, 9001}) {
        const PackedWeightShape shape = {format, block, 3, columns};
        const std::vector<float> values = any_floats(shape.numel(), static_cast<uint32_t>(shape.numel()));
        const std::vector<std::byte> expected = pack(shape, values, usable_packed_weight_sets().front());
        for (const PackedWeightSet& set : usable_packed_weight_sets()) {
          EXPECT_TRUE(pack(shape, values, set) == expected) << set.name << " " << name_of(format) << " " << columns;
          for (const WeightType type : kTypes) {
            EXPECT_TRUE(unpack(shape, expected, type, set) ==
                        unpack(shape, expected, type, usable_packed_weight_sets().front()))
                << set.name << " " << name_of(format) << " " << columns << " " << static_cast<int>(type);
          }
        }
      }
    }
  }
}

TEST(PackedWeightTest, Nf4TakesTheNearestLevel) {
  const PackedWeightShape shape = {WeightFormat::kNf4, 64, 40, 65};
  const std::vector<float> values = normal_floats(shape.numel(), 0.02f);
  const std::vector<float> found = floats(shape, pack(shape, values));
  for (int64_t start = 0; start < shape.numel(); start += shape.block) {
    const int64_t stop = std::min(start + shape.block, shape.numel());
    float largest = 0;
    for (int64_t i = start; i < stop; ++i) largest = std::max(largest, std::abs(values[i]));
    float scale = 0;
    const Half bf16(HalfFormat::kBfloat16);
    std::byte bytes[2];
    bf16.encode({&largest, 1}, {}, bytes);
    bf16.decode(bytes, {&scale, 1});
    for (int64_t i = start; i < stop; ++i) {
      float nearest = std::numeric_limits<float>::infinity();
      for (const float level : kNf4Levels.of_code) nearest = std::min(nearest, std::abs(level * scale - values[i]));
      ASSERT_LE(std::abs(found[i] - values[i]), nearest * 1.00001f) << i;
      ASSERT_LE(nearest, 0.1527f * largest);  // half of the widest gap, and what rounding the scale adds
    }
  }
}

TEST(PackedWeightTest, IntegersAreThoseOfBlockQuant) {
  for (const int64_t bits : {4, 8}) {
    const PackedWeightShape shape = {bits == 4 ? WeightFormat::kInt4 : WeightFormat::kInt8, 64, 7, 33};
    const std::vector<float> values = any_floats(shape.numel(), static_cast<uint32_t>(shape.numel()));
    const BlockQuant codec(bits, 64);
    std::vector<std::byte> encoded(codec.capacity_bytes(shape.numel()));
    std::vector<float> decoded(values.size());
    codec.encode(values, {}, encoded);
    codec.decode(encoded, decoded);
    const std::vector<std::byte> packed = pack(shape, values);
    ASSERT_EQ(packed.size(), kPackedWeightHeaderBytes + encoded.size());
    EXPECT_EQ(std::memcmp(packed.data() + kPackedWeightHeaderBytes, encoded.data(), encoded.size()), 0);
    EXPECT_EQ(std::memcmp(floats(shape, packed).data(), decoded.data(), 4 * decoded.size()), 0);
  }
}

TEST(PackedWeightTest, SixteenBitsAreRoundedFloats) {
  for (const WeightFormat format : kFormats) {
    for (const float size : {1e-42f, 1e-7f, 0.02f, 1e5f, 1e38f}) {
      const PackedWeightShape shape = {format, 32, 5, 77};
      const std::vector<std::byte> packed = pack(shape, normal_floats(shape.numel(), size));
      const std::vector<float> values = floats(shape, packed);
      std::vector<std::byte> rounded(2 * values.size());
      Half(HalfFormat::kBfloat16).encode(values, {}, rounded);
      EXPECT_TRUE(unpack(shape, packed, WeightType::kBfloat16) == rounded) << size;
      Half(HalfFormat::kFloat16).encode(values, {}, rounded);
      EXPECT_TRUE(unpack(shape, packed, WeightType::kFloat16) == rounded) << size;
    }
  }
}

TEST(PackedWeightTest, HasTheFormatThatTheReadmeGives) {
  const std::vector<float> values = {2.0f, -2.0f, 0.0f, 1.4f, -0.2f};
  const std::vector<std::byte> packed = pack({WeightFormat::kNf4, 64, 1, 5}, values);
  // Scale 2.0 as a bfloat16; then elements 0 and 3, 1 and 4, 2 and nothing.
  const std::vector<uint8_t> wanted = {'Z', 'Q', 1, 1, 2, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0x40, 0xef, 0x60, 0x07};
  ASSERT_EQ(packed.size(), wanted.size());
  EXPECT_EQ(std::memcmp(packed.data(), wanted.data(), wanted.size()), 0);
  EXPECT_EQ(packed_weight_bytes({WeightFormat::kNf4, 64, 64, 64}), 16 + 64 * 34);
  EXPECT_EQ(packed_weight_bytes({WeightFormat::kInt8, 64, 0, 64}), 16);
}

TEST(PackedWeightTest, ZerosStayZerosAndWhatIsNotFiniteSpoilsItsBlock) {
  for (const WeightFormat format : kFormats) {
    std::vector<float> values(96, 0.0f);
    values[40] = std::numeric_limits<float>::infinity();
    values[64] = 1.0f;
    const PackedWeightShape shape = {format, 32, 1, 96};
    const std::vector<float> found = floats(shape, pack(shape, values));
    for (int i = 0; i < 96; ++i) {
      EXPECT_EQ(std::isnan(found[i]), i / 32 == 1) << i;
      if (i / 32 == 0) {
        EXPECT_EQ(std::bit_cast<uint32_t>(found[i]), 0u) << i;
      }
    }
    EXPECT_NEAR(found[64], 1.0f, 0.004f);
  }
}

TEST(PackedWeightTest, RefusesBytesThatAreNoPackedWeight) {
  const auto message = [](auto action) -> std::string {
    try {
      action();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  std::vector<std::byte> packed = pack({WeightFormat::kInt4, 64, 2, 64}, std::vector<float>(128, 1.0f));
  EXPECT_EQ(shape_of_packed(packed).columns, 64);
  EXPECT_NE(message([&] { shape_of_packed(std::span(packed).first(15)); }).find("no packed weight"), std::string::npos);
  EXPECT_NE(message([&] { shape_of_packed(std::span(packed).first(30)); }).find("expected 84"), std::string::npos);
  for (const auto& [place, value] :
       std::vector<std::pair<size_t, int>>{{0, 0}, {2, 9}, {3, 0}, {3, 4}, {4, 0}, {4, 255}, {11, 255}}) {
    std::vector<std::byte> changed = packed;
    changed[place] = static_cast<std::byte>(value);
    EXPECT_NE(message([&] { shape_of_packed(changed); }), "nothing was thrown") << place;
  }
  EXPECT_NE(message([] { weight_format_of("fp4"); }).find("expected \"nf4\""), std::string::npos);
  EXPECT_NE(message([] {
              packed_weight_bytes({WeightFormat::kNf4, 100, 1, 1});
            }).find("multiple of 32"),
            std::string::npos);
}

}  // namespace
}  // namespace zeropg

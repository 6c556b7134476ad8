// The contract of Compressor, once. A test file of a compressor instantiates it with its cases:
//   INSTANTIATE_TEST_SUITE_P(Fp16, CompressorSuite, testing::ValuesIn(cases), case_name);
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "compression/registry.h"

namespace zeropg {

struct CompressorCase {
  std::string label;
  std::string name;
  CompressorParameters parameters{};
  double largest_bytes_per_value = 4;  // for long ranges of gradients
  // The most that a value of a block may lose, by the largest magnitude in its block; null: no value has such a bound.
  double (*error_bound)(double value, double largest) = nullptr;
  // The most of the squared norm of what is encoded that the encoding loses; below 1, so that error feedback converges
  // (Stich et al., "Sparsified SGD with Memory", definition 2.1).
  double contraction = 0.999;
  bool keeps_zeros = true;    // among other values; a range of zeros always stays one
  bool is_idempotent = true;  // decoded values encode to themselves
};

inline std::string case_name(const testing::TestParamInfo<CompressorCase>& info) { return info.param.label; }

class CompressorSuite : public testing::TestWithParam<CompressorCase> {
 protected:
  using Floats = std::vector<float>;
  using Bytes = std::vector<std::byte>;

  static constexpr std::byte kCanary{0x5a};

  const Compressor& codec() const { return *codec_; }
  int64_t block() const { return codec_->block_elements(); }
  std::vector<int64_t> sizes() const {
    return {0, 1, 2, 3, 31, block() - 1, block(), block() + 1, 2 * block() + 17, 5 * block()};
  }

  Bytes encode(const Floats& values, Floats* residual = nullptr) const {
    const auto bytes = static_cast<size_t>(codec_->capacity_bytes(static_cast<int64_t>(values.size())));
    Bytes encoded(bytes + 1, kCanary);
    const int64_t length = codec_->encode(values, residual == nullptr ? std::span<float>() : std::span(*residual),
                                          std::span(encoded).first(bytes));
    EXPECT_EQ(encoded.back(), kCanary) << "it wrote beyond capacity_bytes";
    EXPECT_LE(length, static_cast<int64_t>(bytes));
    EXPECT_TRUE(!codec_->has_fixed_size() || length == static_cast<int64_t>(bytes)) << length;
    encoded.resize(static_cast<size_t>(length));
    return encoded;
  }

  Floats decode(const Bytes& encoded, size_t count) const {
    Floats values(count + 1, 42.0f);
    codec_->decode(encoded, std::span(values).first(count));
    EXPECT_EQ(values.back(), 42.0f) << "it wrote beyond the values";
    values.pop_back();
    return values;
  }

  Floats round_trip(const Floats& values) const { return decode(encode(values), values.size()); }

  // Gradients as they are: most are small, some are large, magnitudes differ by block.
  Floats random_values(int64_t count, uint32_t seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats values(count);
    for (int64_t i = 0; i < count; ++i) {
      const float value = normal(random);
      values[i] = value * value * value * std::ldexp(1.0f, static_cast<int>(i / block() % 7) * 3 - 12);
    }
    return values;
  }

  void expect_same(const Floats& a, const Floats& b) const {
    ASSERT_EQ(a.size(), b.size());
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
  }

  static double squared_norm(const Floats& values) {
    double sum = 0;
    for (const float value : values) sum += double{value} * value;
    return sum;
  }

  void expect_contraction(const Floats& values, const std::string& what) const {
    const Floats decoded = round_trip(values);
    Floats lost(values.size());
    for (size_t i = 0; i < values.size(); ++i) lost[i] = values[i] - decoded[i];
    // Denormals may be lost whole: their squares count for nothing in fp32.
    EXPECT_LE(squared_norm(lost), GetParam().contraction * squared_norm(values) + 1e-70) << what;
  }

  void expect_in_bound(const Floats& values, const Floats& decoded) const {
    if (GetParam().error_bound == nullptr) return;
    for (size_t i = 0; i < values.size(); ++i) {
      double largest = 0;
      const size_t start = i / block() * block();
      for (size_t j = start; j < std::min(values.size(), start + block()); ++j) {
        largest = std::max(largest, std::abs(double{values[j]}));
      }
      ASSERT_LE(std::abs(double{values[i]} - decoded[i]), GetParam().error_bound(values[i], largest))
          << values[i] << " became " << decoded[i] << " at " << i << " of " << values.size();
    }
  }

  std::shared_ptr<const Compressor> codec_ = make_compressor(GetParam().name, GetParam().parameters);
};

TEST_P(CompressorSuite, SaysHowManyBytesItTakes) {
  int64_t before = -1;
  for (const int64_t size : {0, 1, 2, 31, 32, 255, 256, 257, 5000}) {
    EXPECT_GE(codec().capacity_bytes(size), before);
    before = codec().capacity_bytes(size);
  }
  EXPECT_EQ(codec().capacity_bytes(0), 0);
  const int64_t many = std::max<int64_t>(100'000, 100 * block());
  const auto taken = static_cast<double>(encode(random_values(many, 12)).size());
  EXPECT_LE(taken, GetParam().largest_bytes_per_value * static_cast<double>(many));
  EXPECT_LE(codec().typical_bytes(many), codec().capacity_bytes(many));
  EXPECT_LE(static_cast<double>(codec().typical_bytes(many)), 2 * taken);
  EXPECT_GE(static_cast<double>(codec().typical_bytes(many)), taken / 2);
  EXPECT_NE(codec().description().find(GetParam().name), std::string::npos);
}

TEST_P(CompressorSuite, KeepsItsErrorBoundAtEverySize) {
  for (const int64_t size : sizes()) {
    const Floats values = random_values(size, 1);
    expect_in_bound(values, round_trip(values));
  }
}

TEST_P(CompressorSuite, KeepsItsErrorBoundOnOddValues) {
  Floats outlier = random_values(3 * block(), 2);
  outlier[block() / 2] = 1e4f;
  expect_in_bound(outlier, round_trip(outlier));
  const Floats constant(block() + 5, -0.1f);
  expect_in_bound(constant, round_trip(constant));
  Floats tiny(block() + 5);
  for (size_t i = 0; i < tiny.size(); ++i) tiny[i] = std::ldexp(1.0f, -149 + static_cast<int>(i % 40));
  expect_in_bound(tiny, round_trip(tiny));
}

TEST_P(CompressorSuite, LosesLessThanThereIs) {
  for (const int64_t size : sizes()) {
    if (size == 0) continue;
    const std::string at = " at " + std::to_string(size);
    expect_contraction(random_values(size, 20), "heavy tails" + at);
    std::mt19937 random(21);
    std::normal_distribution<float> normal;
    Floats values(size);
    for (float& value : values) value = normal(random);
    expect_contraction(values, "Gaussian" + at);
    values[size / 2] = 1e4f;
    expect_contraction(values, "one outlier" + at);
    expect_contraction(Floats(size, 0.0f), "zeros" + at);
    expect_contraction(Floats(size, -0.3f), "a constant" + at);
    for (int64_t i = 0; i < size; ++i)
      values[i] = std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, -149 + static_cast<int>(i % 20));
    expect_contraction(values, "denormals" + at);
  }
}

TEST_P(CompressorSuite, KeepsARangeOfZeros) {
  for (const int64_t size : sizes()) {
    for (const float value : round_trip(Floats(size, 0.0f))) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0U);
  }
}

TEST_P(CompressorSuite, KeepsZerosExactly) {
  if (!GetParam().keeps_zeros) GTEST_SKIP() << "zeros among other values become small ones";
  Floats values(3 * block() + 1, 0.0f);
  for (int64_t i = 0; i < block(); i += 2) values[i] = static_cast<float>(i);
  const Floats decoded = round_trip(values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 0.0f) {
      EXPECT_EQ(std::bit_cast<uint32_t>(decoded[i]), 0U) << i;
    }
  }
}

TEST_P(CompressorSuite, DecodedValuesSurviveAnotherRoundUnchanged) {
  if (!GetParam().is_idempotent) GTEST_SKIP() << "it encodes what it has decoded to something else";
  for (const int64_t size : sizes()) {
    const Floats once = round_trip(random_values(size, 3));
    expect_same(round_trip(once), once);
  }
}

TEST_P(CompressorSuite, EncodesAlignedRangesAsTheWhole) {
  if (!codec().has_fixed_size()) GTEST_SKIP() << "each range has a choice of its own";
  const Floats values = random_values(7 * block() + 11, 4);
  const Bytes whole = encode(values);
  for (const int64_t cut : {block(), 3 * block(), 7 * block()}) {
    Bytes parts = encode({values.begin(), values.begin() + cut});
    EXPECT_EQ(static_cast<int64_t>(parts.size()), codec().capacity_bytes(cut));
    const Bytes rest = encode({values.begin() + cut, values.end()});
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_TRUE(parts == whole) << cut;
  }
}

TEST_P(CompressorSuite, AddsWhatItDecodes) {
  for (const int64_t size : sizes()) {
    const Bytes encoded = encode(random_values(size, 5));
    const Floats decoded = decode(encoded, size);
    const Floats before = random_values(size, 6);
    Floats sum = before;
    codec().decode_add(encoded, sum);
    for (int64_t i = 0; i < size; ++i) EXPECT_EQ(sum[i], before[i] + decoded[i]);
  }
}

TEST_P(CompressorSuite, KeepsWhatItLosesInTheResidual) {
  for (const int64_t size : sizes()) {
    const Floats values = random_values(size, 7);
    const Floats before = round_trip(random_values(size, 8));
    Floats residual = before;
    const Floats decoded = decode(encode(values, &residual), size);
    for (int64_t i = 0; i < size; ++i) {
      const double wanted = double{values[i]} + before[i];
      const double tolerance = 1e-6 * (std::abs(wanted) + std::abs(double{decoded[i]}));
      ASSERT_NEAR(double{decoded[i]} + residual[i], wanted, tolerance) << i;
    }
  }
}

// Over many steps nothing is lost: what was sent and what is pending is what went in.
TEST_P(CompressorSuite, LosesNothingOverManySteps) {
  const int64_t size = 2 * block() + 9;
  Floats residual(size, 0.0f);
  std::vector<double> given(size, 0.0), sent(size, 0.0);
  double largest = 0;
  for (uint32_t step = 0; step < 50; ++step) {
    const Floats values = random_values(size, 100 + step);
    const Floats decoded = decode(encode(values, &residual), size);
    for (int64_t i = 0; i < size; ++i) {
      given[i] += values[i];
      sent[i] += decoded[i];
      largest = std::max(largest, std::abs(given[i]));
    }
  }
  for (int64_t i = 0; i < size; ++i) ASSERT_NEAR(sent[i] + residual[i], given[i], 1e-4 * largest) << i;
}

TEST_P(CompressorSuite, EncodesTheSameWithAResidualOfZeros) {
  const Floats values = random_values(2 * block() + 3, 9);
  Floats residual(values.size(), 0.0f);
  EXPECT_TRUE(encode(values, &residual) == encode(values));
}

// A gradient scaler looks at what comes out; what is pending must not be spoilt by it.
TEST_P(CompressorSuite, ShowsWhatIsNotFiniteAndKeepsTheResidualClean) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (const int64_t place : {int64_t{0}, block() - 1, 3 * block() + 2}) {
      Floats values = random_values(3 * block() + 3, 10);
      Floats residual(values.size(), 0.0f);
      encode(values, &residual);
      const Floats before = residual;
      values[place] = bad;
      const Floats decoded = decode(encode(values, &residual), values.size());
      EXPECT_FALSE(std::isfinite(decoded[place]));
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(std::isfinite(residual[i]));
        if (codec().has_fixed_size() && static_cast<int64_t>(i) / block() != place / block()) {
          EXPECT_TRUE(std::isfinite(decoded[i])) << "a neighbouring block was spoilt at " << i;
        }
      }
      EXPECT_EQ(residual[place], before[place]);
    }
  }
}

TEST_P(CompressorSuite, SurvivesAnyBytes) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const int64_t size = static_cast<int64_t>(random() % (2 * block() + 40));
    auto length = static_cast<size_t>(codec().capacity_bytes(size));
    if (!codec().has_fixed_size() && round % 3 != 0) length = random() % (length + 1);
    Bytes garbage = round % 4 == 0 ? encode(random_values(size, round)) : Bytes(length);
    if (round % 4 == 0) {  // an encoding with one byte changed
      if (!garbage.empty()) garbage[random() % garbage.size()] = std::byte(random() >> 11);
    } else {
      for (std::byte& byte : garbage) byte = round % 2 == 0 ? std::byte(random() >> 11) : std::byte{0xff};
    }
    const Floats once = decode(garbage, size);
    expect_same(decode(garbage, size), once);
    Floats sum(size, 1.0f);
    codec().decode_add(garbage, sum);
  }
}

}  // namespace zeropg

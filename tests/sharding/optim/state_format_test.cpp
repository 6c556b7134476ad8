#include "sharding/optim/state_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "sharding/optim/elementwise.h"
#include "sharding/optim/stochastic_rounding.h"

namespace zeropg {
namespace {

constexpr StateFormat kFormats[] = {StateFormat::kBFloat16, StateFormat::kSigned8, StateFormat::kUnsigned8};

std::vector<std::byte> room_for(StateFormat format, int64_t numel) {
  return std::vector<std::byte>(entries_of(format, numel) * (is_blocked(format) ? 1 : 2));
}

std::vector<float> widened(StateFormat format, const std::vector<std::byte>& entries, int64_t numel) {
  std::vector<float> values(numel);
  widen_state(best_isa(), format, entries.data(), values.data(), numel);
  return values;
}

std::vector<float> stored(StateFormat format, const std::vector<float>& values) {
  const int64_t numel = static_cast<int64_t>(values.size());
  std::vector<std::byte> entries = room_for(format, numel);
  store_state(format, values.data(), entries.data(), numel);
  return widened(format, entries, numel);
}

std::vector<uint32_t> words(const std::vector<float>& values, const std::vector<float>& parameters, int64_t step) {
  std::vector<uint32_t> random(values.size());
  for (size_t i = 0; i < values.size(); ++i) random[i] = random_bits(rounding_key(step), values[i], parameters[i]);
  return random;
}

std::vector<float> rounded(StateFormat format, const std::vector<float>& values, int64_t step) {
  const int64_t numel = static_cast<int64_t>(values.size());
  std::vector<std::byte> entries = room_for(format, numel);
  const std::vector<uint32_t> random = words(values, std::vector<float>(numel, 0.25f), step);
  round_state(best_isa(), format, values.data(), random.data(), step % 2, entries.data(), numel);
  return widened(format, entries, numel);
}

// Over some octaves; negative ones where the format has them.
std::vector<float> samples(StateFormat format, int64_t numel, int octaves) {
  std::vector<float> values(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const double sign = format != StateFormat::kUnsigned8 && i % 3 == 0 ? -1 : 1;
    const double value = (1.0 + std::fmod(static_cast<double>(i) * 0.6180339887, 1.0)) * 1e-4;
    values[i] = static_cast<float>(sign * std::ldexp(value, -static_cast<int>(i * 7 % octaves)));
  }
  return values;
}

bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0;
}

TEST(StateFormat, what_is_stored_comes_out_within_half_a_step_and_is_stored_again_unchanged) {
  for (const StateFormat format : kFormats) {
    for (const int64_t numel : {1, 31, 32, 33, 1000}) {
      const std::vector<float> values = samples(format, numel, 12);
      const std::vector<float> once = stored(format, values);
      for (int64_t i = 0; i < numel; ++i) {
        const double bound = std::ldexp(std::abs(values[i]), format == StateFormat::kBFloat16 ? -8 : -4);
        EXPECT_NEAR(once[i], values[i], bound) << static_cast<int>(format) << " element " << i;
        uint32_t bits;
        std::memcpy(&bits, &once[i], sizeof bits);
        EXPECT_EQ(bits & 0xffffu, 0u) << "no bfloat16";
      }
      EXPECT_TRUE(same_bits(stored(format, once), once));
      EXPECT_TRUE(same_bits(rounded(format, once, 5), once)) << "what fits is not rounded";
    }
  }
}

TEST(StateFormat, rounding_is_right_on_average_also_below_the_smallest_code) {
  for (const StateFormat format : kFormats) {
    const std::vector<float> values = samples(format, 320, format == StateFormat::kUnsigned8 ? 30 : 22);
    constexpr int kRounds = 4000;
    std::vector<double> sums(values.size());
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<float> once = rounded(format, values, round);
      for (size_t i = 0; i < values.size(); ++i) sums[i] += once[i];
    }
    for (size_t i = 0; i < values.size(); ++i) {
      // The spacing is at most an eighth of the value, or of the smallest code; five standard deviations.
      const double spacing = std::max<double>(std::abs(values[i]) / 8, 2e-4 * std::ldexp(1.2, -15));
      EXPECT_NEAR(sums[i] / kRounds, values[i], 5 * spacing / 2 / std::sqrt(kRounds)) << static_cast<int>(format);
    }
  }
}

TEST(StateFormat, equal_values_beside_other_parameters_and_in_other_steps_are_rounded_apart) {
  constexpr int64_t kNumel = 1 << 16;
  const std::vector<float> values(kNumel, 1.00390625f * 1.0039f);
  std::vector<float> parameters(kNumel);
  for (int64_t i = 0; i < kNumel; ++i) parameters[i] = static_cast<float>(i) * 1e-5f;
  std::vector<std::vector<bool>> ups;
  for (const auto& [step, slot] : {std::pair{1, 0}, {1, 1}, {2, 0}, {2, 1}}) {
    std::vector<std::byte> entries = room_for(StateFormat::kBFloat16, kNumel);
    const std::vector<uint32_t> random = words(values, parameters, step);
    round_state(best_isa(), StateFormat::kBFloat16, values.data(), random.data(), slot, entries.data(), kNumel);
    const std::vector<float> once = widened(StateFormat::kBFloat16, entries, kNumel);
    std::vector<bool> up(kNumel);
    for (int64_t i = 0; i < kNumel; ++i) up[i] = once[i] > values[i];
    ups.push_back(up);
  }
  const double chance = std::fmod(values[0] * 128.0, 1.0);
  const double deviation = std::sqrt(chance * (1 - chance) / kNumel);
  for (size_t a = 0; a < ups.size(); ++a) {
    int64_t count = 0, next = 0;
    for (int64_t i = 0; i < kNumel; ++i) count += ups[a][i];
    for (int64_t i = 1; i < kNumel; ++i) next += ups[a][i] && ups[a][i - 1];
    EXPECT_NEAR(static_cast<double>(count) / kNumel, chance, 5 * deviation);
    EXPECT_NEAR(static_cast<double>(next) / kNumel, chance * chance, 8 * deviation);
    for (size_t b = 0; b < a; ++b) {
      int64_t both = 0;
      for (int64_t i = 0; i < kNumel; ++i) both += ups[a][i] && ups[b][i];
      EXPECT_NEAR(static_cast<double>(both) / kNumel, chance * chance, 8 * deviation);
    }
  }
}

TEST(StateFormat, a_positive_second_moment_never_becomes_zero) {
  std::vector<float> values(32, 0.0f);
  values[0] = 1e30f;
  values[1] = 1e-30f;
  values[2] = 1.5e-38f;
  for (const std::vector<float>& once :
       {stored(StateFormat::kUnsigned8, values), rounded(StateFormat::kUnsigned8, values, 1)}) {
    EXPECT_GT(once[1], 0.0f);
    EXPECT_GT(once[2], 0.0f);
    EXPECT_LT(once[2], 1e21f);
    EXPECT_EQ(once[3], 0.0f);
  }
}

TEST(StateFormat, finite_stays_finite_and_what_is_not_stays_what_it_is) {
  const float largest = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const StateFormat format : kFormats) {
    for (int64_t step = 0; step < 50; ++step) {
      const std::vector<float> huge = rounded(format, std::vector<float>(33, largest), step);
      for (const float value : huge) {
        EXPECT_TRUE(std::isfinite(value) && value > largest / 2);
      }
    }
    std::vector<float> values(33, 1.0f);
    values[0] = infinity;
    values[1] = std::nanf("");
    values[32] = largest;
    for (const std::vector<float>& once : {stored(format, values), rounded(format, values, 3)}) {
      EXPECT_EQ(once[0], infinity);
      EXPECT_TRUE(std::isnan(once[1]));
      EXPECT_TRUE(std::isfinite(once[2]) && std::isfinite(once[32]));
    }
  }
  EXPECT_EQ(rounded(StateFormat::kSigned8, {-infinity}, 1)[0], -infinity);
}

TEST(StateFormat, every_instruction_set_gives_the_same_bits) {
  for (const StateFormat format : kFormats) {
    const std::vector<float> values = samples(format, 1111, 40);
    std::vector<std::byte> plain = room_for(format, 1111);
    const std::vector<uint32_t> random = words(values, values, 7);
    round_state(Isa::kPlain, format, values.data(), random.data(), 1, plain.data(), 1111);
    for (const Isa isa : supported_isas()) {
      std::vector<std::byte> other = room_for(format, 1111);
      round_state(isa, format, values.data(), random.data(), 1, other.data(), 1111);
      EXPECT_EQ(plain, other);
      std::vector<float> again(1111);
      widen_state(isa, format, other.data(), again.data(), 1111);
      EXPECT_TRUE(same_bits(again, widened(format, plain, 1111)));
    }
  }
}

TEST(StateFormat, zeros_are_zero_bytes) {
  for (const StateFormat format : kFormats) {
    std::vector<std::byte> entries = room_for(format, 40);
    std::fill(entries.begin(), entries.end(), std::byte{1});
    const std::vector<float> zeros(40, 0.0f);
    const std::vector<uint32_t> random(40, 0xffffffffu);
    round_state(best_isa(), format, zeros.data(), random.data(), 0, entries.data(), 40);
    EXPECT_EQ(entries, room_for(format, 40));
  }
}

}  // namespace
}  // namespace zeropg

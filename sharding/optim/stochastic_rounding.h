// Note [Stochastic rounding] of state_format.h, for one element: its random bits, and rounding by them. For the sources
// of optimizers and formats.
#pragma once

#include <cstdint>

namespace zeropg {

enum class Isa : uint8_t;

[[gnu::always_inline]] inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
[[gnu::always_inline]] inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// Of a step, the same for all its elements.
struct RoundingKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

RoundingKey rounding_key(int64_t step);

// A word of random bits: multiplications and foldings as in MurmurHash3's finalizer. Its halves serve one rounding
// each.
[[gnu::always_inline]] inline uint32_t random_bits(RoundingKey key, float value, float parameter) {
  uint32_t hash = (bits_of(value) ^ key.first) * 0x9e3779b1u;
  hash = (hash ^ (hash >> 15)) + (bits_of(parameter) ^ key.second) * 0x85ebca6bu;
  hash = (hash ^ (hash >> 14)) * 0xc2b2ae35u;
  return hash ^ (hash >> 16);
}

// The same for `numel` elements.
void hash_values(Isa isa, RoundingKey key, const float* values, const float* parameters, uint32_t* random,
                 int64_t numel);

// The bits of a positive float, or of a NaN of arithmetic, after the upper ones of `random` have been added below the
// `cut` last ones. Not beyond the largest float.
[[gnu::always_inline]] inline uint32_t dithered(uint32_t magnitude, uint32_t random, int cut) {
  const uint32_t sum = magnitude + (random >> (32 - cut));
  const uint32_t finite = sum < kInfinityBits - 1 ? sum : kInfinityBits - 1;
  return magnitude >= kInfinityBits ? magnitude : finite;
}

[[gnu::always_inline]] inline uint16_t rounded_to_bfloat16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((dithered(bits & 0x7fffffffu, random, 16) | (bits & 0x80000000u)) >> 16);
}

}  // namespace zeropg

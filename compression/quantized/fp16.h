// IEEE half precision: half of fp32's bytes, nearest even. Values beyond 65504 become infinite, so that a gradient
// scaler notices; those below 2^-25 become zero and stay in the residual.
#pragma once

#include <bit>

#include "compression/compressor.h"

namespace zeropg {

class Fp16 final : public Compressor {
 public:
  static constexpr char kHelp[] = "IEEE half precision: 50 % of fp32's bytes. Gradients beyond 65504 become infinite.";

  std::string description() const override { return "fp16()"; }
  int64_t block_elements() const override { return 1; }
  int64_t capacity_bytes(int64_t count) const override { return 2 * count; }

  int64_t encode(std::span<const float> values, std::span<float> residual,
                 std::span<std::byte> encoded) const override {
    for (size_t i = 0; i < values.size(); ++i) {
      const float value = residual.empty() ? values[i] : values[i] + residual[i];
      const uint16_t half = narrow(value);
      encoded[2 * i] = static_cast<std::byte>(half & 0xff);
      encoded[2 * i + 1] = static_cast<std::byte>(half >> 8);
      if (!residual.empty() && (half & 0x7fff) < 0x7c00) residual[i] = value - widen(half);
    }
    return capacity_bytes(static_cast<int64_t>(values.size()));
  }

  void decode(std::span<const std::byte> encoded, std::span<float> values) const override {
    for (size_t i = 0; i < values.size(); ++i) values[i] = value_at(encoded, i);
  }

  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override {
    for (size_t i = 0; i < values.size(); ++i) values[i] += value_at(encoded, i);
  }

 private:
  static float value_at(std::span<const std::byte> encoded, size_t index) {
    return widen(static_cast<uint16_t>(std::to_integer<uint16_t>(encoded[2 * index]) |
                                       std::to_integer<uint16_t>(encoded[2 * index + 1]) << 8));
  }

  static float widen(uint16_t half) {
    const uint32_t sign = (half & 0x8000U) << 16;
    const uint32_t magnitude = half & 0x7fffU;
    if (magnitude > 0x7c00) return std::bit_cast<float>(0x7fc00000U);
    if (magnitude == 0x7c00) return std::bit_cast<float>(sign | 0x7f800000U);
    if (magnitude >= 0x0400) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24F));
  }

  static uint16_t narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000U;
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return 0x7e00;
    if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // rounds to 2^16 or above
    if (magnitude < 0x38800000U) {
      // Below 2^-14 a half counts units of 2^-24: the last bit of 1/2, to which adding it rounds.
      return static_cast<uint16_t>(
          sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<uint32_t>(0.5F)));
    }
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U + 0xfffU + (magnitude >> 13 & 1)) >> 13));
  }
};

}  // namespace zeropg

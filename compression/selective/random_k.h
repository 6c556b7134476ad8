// Values at random places: a cheap codec to compare top-k with. What is not sent stays in the residual.
//
// Source: Stich et al., "Sparsified SGD with Memory", definition 2.1 (rand_k). The format: README.md.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "compression/compressor.h"
#include "compression/decimal.h"

namespace zeropg {

class RandomK final : public Compressor {
 public:
  static constexpr char kHelp[] = R"(One value of each 1 / ratio, at a random place: 1.03 % of fp32's bytes at 0.01.

    ratio: of the values, from 5e-5 to 1.

    To compare top_k with. Needs error feedback.

    Raises ValueError for other values.)";

  // std::invalid_argument.
  explicit RandomK(double ratio) : ratio_(ratio) {
    if (!(ratio >= kLeastRatio && ratio <= 1)) {
      throw std::invalid_argument("random_k: ratio is " + shortest_decimal(ratio) + ", expected 5e-05 to 1");
    }
    stride_ = static_cast<int64_t>(1 / ratio);
    strides_ = std::clamp<int64_t>(kMostElements / stride_, 1, kMostStrides);
    if (strides_ < kMostStrides) stride_ -= stride_ % kLine;
  }

  std::string description() const override { return "random_k(ratio=" + shortest_decimal(ratio_) + ")"; }
  int64_t block_elements() const override { return strides_ * stride_; }

  int64_t capacity_bytes(int64_t count) const override {
    const int64_t blocks = (count + block_elements() - 1) / block_elements();
    return kSeedBytes * blocks + kValueBytes * ((count + stride_ - 1) / stride_);
  }

  int64_t encode(std::span<const float> values, std::span<float> residual,
                 std::span<std::byte> encoded) const override {
    for_each_block(values, encoded, [&](std::span<const float> block, size_t start, auto bytes) {
      encode_block(block, residual.empty() ? residual : residual.subspan(start, block.size()), bytes);
    });
    return capacity_bytes(static_cast<int64_t>(values.size()));
  }

  void decode(std::span<const std::byte> encoded, std::span<float> values) const override {
    std::fill(values.begin(), values.end(), 0.0f);
    decode_add(encoded, values);
  }

  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override {
    for_each_block(values, encoded, [&](std::span<float> block, size_t, auto bytes) { add_block(bytes, block); });
  }

 private:
  static constexpr int64_t kMostStrides = 32;  // in a block; the seed then is 3 % of it
  static constexpr int64_t kMostElements =
      1 << 15;                          // so that a block of each rank of a node fits into a bank of staging memory
  static constexpr int64_t kLine = 16;  // elements of a cache line, of which a block has whole ones
  static constexpr double kLeastRatio = 5e-5;
  static constexpr int64_t kSeedBytes = 4;
  static constexpr int64_t kValueBytes = 4;

  // visit(block of values, where it starts, its bytes)
  template <class Value, class Byte, class Visit>
  void for_each_block(std::span<Value> values, std::span<Byte> encoded, Visit visit) const {
    const auto size = static_cast<size_t>(block_elements());
    for (size_t start = 0; start < values.size(); start += size) {
      const std::span<Value> block = values.subspan(start, std::min(size, values.size() - start));
      const auto bytes = static_cast<size_t>(capacity_bytes(static_cast<int64_t>(block.size())));
      visit(block, start, encoded.first(bytes));
      encoded = encoded.subspan(bytes);
    }
  }

  // visit(place in the block, index of the stride)
  template <class Visit>
  void for_each_place(size_t count, uint32_t seed, Visit visit) const {
    const auto stride = static_cast<size_t>(stride_);
    for (size_t start = 0, i = 0; start < count; start += stride, ++i) {
      const size_t length = std::min(stride, count - start);
      visit(start + (mix(static_cast<uint32_t>(i)) + uint64_t{seed}) % length, i);
    }
  }

  static float load(const std::byte* place) {
    float value;
    std::memcpy(&value, place, sizeof(value));
    return value;
  }

  // The finalizer of MurmurHash3.
  static uint32_t mix(uint32_t number) {
    number = (number ^ number >> 16) * 0x85ebca6bU;
    number = (number ^ number >> 13) * 0xc2b2ae35U;
    return number ^ number >> 16;
  }

  struct Look {
    uint32_t hash = 0;     // of all values
    uint32_t largest = 0;  // magnitude as bits: in the order of the absolute values, with infinity and NaN on top
  };

  // Written for the vectorizer: no branch inside.
  template <class Sum>
  static Look look(size_t count, Sum sum) {
    Look result;
    for (size_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(sum(i));
      result.hash += bits * (2 * static_cast<uint32_t>(i) + 0x9e3779b1U);
      result.largest = std::max(result.largest, bits & 0x7fffffffU);
    }
    return result;
  }

  void encode_block(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const {
    if (residual.empty()) {
      send(values, residual, encoded, [values](size_t i) { return values[i]; });
    } else {
      send(values, residual, encoded, [values, residual](size_t i) { return values[i] + residual[i]; });
    }
  }

  template <class Sum>
  void send(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded, Sum sum) const {
    const auto [hash, largest] = look(values.size(), sum);
    const bool is_finite = largest < 0x7f800000;
    uint32_t seed = mix(hash);
    const auto hits_zeros_only = [&] {
      bool result = true;
      for_each_place(values.size(), seed, [&](size_t place, size_t) { result &= sum(place) == 0.0f; });
      return result;
    };
    // The next seed moves all places by one, so some seed finds what is there.
    while (is_finite && largest > 0 && hits_zeros_only()) ++seed;
    std::memcpy(encoded.data(), &seed, kSeedBytes);
    std::byte* const numbers = encoded.data() + kSeedBytes;
    for_each_place(values.size(), seed, [&](size_t place, size_t i) {
      const float value = is_finite ? sum(place) + 0.0f : std::numeric_limits<float>::quiet_NaN();  // no -0
      std::memcpy(numbers + kValueBytes * i, &value, kValueBytes);
    });
    if (residual.empty() || !is_finite) return;
    for (size_t i = 0; i < values.size(); ++i) residual[i] += values[i];
    for_each_place(values.size(), seed, [&](size_t place, size_t) { residual[place] = 0.0f; });
  }

  void add_block(std::span<const std::byte> encoded, std::span<float> values) const {
    uint32_t seed;
    std::memcpy(&seed, encoded.data(), kSeedBytes);
    const std::byte* const numbers = encoded.data() + kSeedBytes;
    if (!std::isfinite(load(numbers))) {
      std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
      return;
    }
    for_each_place(values.size(), seed,
                   [&](size_t place, size_t i) { values[place] += load(numbers + kValueBytes * i); });
  }

  double ratio_;
  int64_t stride_ = 1;
  int64_t strides_ = 1;  // of a block
};

}  // namespace zeropg

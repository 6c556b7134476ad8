// The bytes that top-k sends: some values of a range with their places, or all of them where that takes no more. Byte
// by byte in README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "compression/block_quant.h"

namespace zeropg {

class TopKPayload {
 public:
  // `value_bits`: 32 (fp32), 16 (bfloat16) or 8 (a signed byte, with a scale for each 256 values).
  explicit TopKPayload(int64_t value_bits) : value_bits_(value_bits) {}

  // Values whose magnitude is at least this would not stay finite.
  uint32_t limit() const { return value_bits_ == 32 ? 0x7f800000 : 0x7f7f0000; }

  // The most that any choice of values out of `count` takes, which is all of them.
  int64_t capacity_bytes(int64_t count) const { return count == 0 ? 0 : 1 + value_bytes(count); }
  // What `entries` of them take where gradients cluster: 4.5 bits for a place (0.1 to 10 % of a gradient: 3 to 5.4).
  int64_t typical_bytes(int64_t count, int64_t entries) const;

  // encoded <- values[places], which rise. residual (may be empty; may be `values` itself) <- values - decoded, at the
  // places that are sent. Returns how many bytes it wrote.
  int64_t write(std::span<const float> values, std::span<const uint32_t> places, std::span<float> residual,
                std::span<std::byte> encoded) const;
  // What decodes to NaN everywhere.
  static int64_t write_not_finite(std::span<std::byte> encoded);

  // Any bytes are survived: those that are no encoding make every value NaN.
  void decode(std::span<const std::byte> encoded, std::span<float> values) const;
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const;

 private:
  int64_t value_bytes(int64_t count) const;
  void code(std::span<const float> values, std::byte* encoded) const;
  // Values `first` to `first + values.size()` of those from `encoded` on; `first` is a multiple of kChunk.
  void decode_values(const std::byte* encoded, int64_t first, std::span<float> values) const;
  template <class PlaceOf>
  void write_values(std::span<const float> values, int64_t count, PlaceOf place_of, std::span<float> residual,
                    std::byte* encoded) const;
  bool add(std::span<const std::byte> encoded, std::span<float> values) const;
  bool add_entries(std::span<const std::byte> encoded, std::span<float> values) const;

  static constexpr int64_t kChunk = 256;  // values that share a scale

  int64_t value_bits_;
  BlockQuant bytes_{8, kChunk};
};

}  // namespace zeropg

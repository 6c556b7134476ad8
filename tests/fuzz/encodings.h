// What a peer may send where a codec is named: any bytes in place of an encoding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "compression/quantized/block_quant.h"
#include "compression/quantized/half.h"
#include "compression/selective/random_k.h"
#include "compression/selective/top_k_payload.h"

namespace zeropg::fuzz {

// Both ways to decode agree: all NaN, or the sum of what was decoded and zeros.
template <class Codec>
void decode_both(const Codec& codec, std::span<const std::byte> input, bool is_fixed_size, size_t count) {
  // As long as it may be and no longer, so that AddressSanitizer sees each step beyond.
  const auto capacity = static_cast<size_t>(codec.capacity_bytes(static_cast<int64_t>(count)));
  std::vector<std::byte> encoded(input.begin(), input.begin() + std::min(input.size(), capacity));
  if (is_fixed_size) encoded.resize(capacity);
  encoded.shrink_to_fit();
  std::vector<float> values(count, 1.0f);
  std::vector<float> sums(count, 0.0f);
  codec.decode(encoded, values);
  codec.decode_add(encoded, sums);
  for (size_t i = 0; i < count; ++i) {
    if (sums[i] != values[i] && (sums[i] == sums[i] || values[i] == values[i])) std::abort();
  }
}

// The first byte says which codec, the next two how many values; the rest is the encoding.
inline void encodings(std::span<const uint8_t> input) {
  if (input.size() < 3) return;
  const size_t count = input[1] | (input[2] & 0x1f) << 8;
  const auto encoded = std::as_bytes(input.subspan(3));
  switch (input[0] % 7) {
    case 0:
      return decode_both(BlockQuant(8, 256), encoded, true, count);
    case 1:
      return decode_both(BlockQuant(4, 32), encoded, true, count);
    case 2:
      return decode_both(Half(HalfFormat::kFloat16), encoded, true, count);
    case 3:
      return decode_both(RandomK(0.1), encoded, true, count);
    default:
      return decode_both(TopKPayload(input[0] % 7 == 4 ? 32 : input[0] % 7 == 5 ? 16 : 8), encoded, false, count);
  }
}

}  // namespace zeropg::fuzz

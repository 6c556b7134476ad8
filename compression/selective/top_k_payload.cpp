#include "compression/selective/top_k_payload.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "compression/quantized/block_quant.h"
#include "compression/quantized/half.h"
#include "compression/selective/elias_gamma.h"

namespace zeropg {

namespace {

// The low two bits of the first byte; the others are the order of the codes of places.
enum Form : uint8_t { kNotFinite = 0, kEntries = 1, kAll = 2 };

constexpr int64_t kHeaderBytes = 5;  // of kEntries: the first byte and the number of entries

std::unique_ptr<const Compressor> coder_of(int64_t value_bits, int64_t block) {
  if (value_bits == 8) return std::make_unique<BlockQuant>(8, block);
  if (value_bits == 16) return std::make_unique<Half>(HalfFormat::kBfloat16);
  return nullptr;
}

// How far places[i] is from the one before; the first is counted from -1.
uint32_t step(std::span<const uint32_t> places, size_t i) { return i == 0 ? places[0] + 1 : places[i] - places[i - 1]; }

// About the order in which the steps are shortest. Bits of (step - 1): those below the order cost one each, those above
// it two, and there is a one between them.
int best_order(std::span<const uint32_t> places) {
  std::array<int64_t, 33> widths{};
  for (size_t i = 0; i < places.size(); ++i) ++widths[std::bit_width(step(places, i) - 1)];
  int best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int order = 0; order <= kLargestGammaOrder; ++order) {
    int64_t bits = 0;
    for (int width = 0; width <= 32; ++width) bits += widths[width] * (1 + order + 2 * std::max(0, width - order));
    if (bits < least) {
      least = bits;
      best = order;
    }
  }
  return best;
}

int64_t bytes_of_places(std::span<const uint32_t> places, int order) {
  int64_t bits = 0;
  for (size_t i = 0; i < places.size(); ++i) bits += gamma_bits(step(places, i), order);
  return (bits + 7) / 8;
}

}  // namespace

TopKPayload::TopKPayload(int64_t value_bits) : coder_(coder_of(value_bits, kChunk)) {}

int64_t TopKPayload::value_bytes(int64_t count) const {
  return coder_ == nullptr ? static_cast<int64_t>(sizeof(float)) * count : coder_->capacity_bytes(count);
}

int64_t TopKPayload::typical_bytes(int64_t count, int64_t entries) const {
  return std::min(capacity_bytes(count), kHeaderBytes + value_bytes(entries) + entries * 9 / 16);
}

void TopKPayload::code(std::span<const float> values, std::byte* encoded) const {
  const auto bytes = static_cast<size_t>(value_bytes(static_cast<int64_t>(values.size())));
  if (coder_ == nullptr) {
    std::memcpy(encoded, values.data(), bytes);
  } else {
    coder_->encode(values, {}, {encoded, bytes});
  }
}

void TopKPayload::decode_values(const std::byte* encoded, int64_t first, std::span<float> values) const {
  const auto bytes = static_cast<size_t>(value_bytes(static_cast<int64_t>(values.size())));
  encoded += value_bytes(first);
  if (coder_ == nullptr) {
    std::memcpy(values.data(), encoded, bytes);
  } else {
    coder_->decode({encoded, bytes}, values);
  }
}

template <class PlaceOf>
void TopKPayload::write_values(std::span<const float> values, int64_t count, PlaceOf place_of,
                               std::span<float> residual, std::byte* encoded) const {
  std::array<float, kChunk> sent;
  std::array<float, kChunk> decoded;
  for (int64_t first = 0; first < count; first += kChunk) {
    const auto length = static_cast<size_t>(std::min(kChunk, count - first));
    // -0 becomes +0, as which it decodes where it is not sent.
    for (size_t i = 0; i < length; ++i) sent[i] = values[place_of(first + i)] + 0.0f;
    std::byte* const place = encoded + value_bytes(first);
    code({sent.data(), length}, place);
    if (residual.empty()) continue;
    decode_values(place, 0, {decoded.data(), length});
    for (size_t i = 0; i < length; ++i) residual[place_of(first + i)] = sent[i] - decoded[i];
  }
}

int64_t TopKPayload::write(std::span<const float> values, std::span<const uint32_t> places, std::span<float> residual,
                           std::span<std::byte> encoded) const {
  const auto count = static_cast<int64_t>(values.size());
  const auto entries = static_cast<int64_t>(places.size());
  const int order = best_order(places);
  const int64_t place_bytes = bytes_of_places(places, order);
  if (1 + value_bytes(count) <= kHeaderBytes + value_bytes(entries) + place_bytes) {
    encoded[0] = std::byte{kAll};
    write_values(
        values, count, [](int64_t i) { return i; }, residual, &encoded[1]);
    return 1 + value_bytes(count);
  }
  encoded[0] = std::byte(kEntries | order << 2);
  const auto length = static_cast<uint32_t>(entries);
  std::memcpy(&encoded[1], &length, sizeof(length));
  write_values(
      values, entries, [&](int64_t i) { return places[i]; }, residual, &encoded[kHeaderBytes]);
  GammaWriter writer(&encoded[kHeaderBytes] + value_bytes(entries));
  for (size_t i = 0; i < places.size(); ++i) writer.write(step(places, i), order);
  return writer.finish() - encoded.data();
}

int64_t TopKPayload::write_not_finite(std::span<std::byte> encoded) {
  encoded[0] = std::byte{kNotFinite};
  return 1;
}

void TopKPayload::decode(std::span<const std::byte> encoded, std::span<float> values) const {
  std::fill(values.begin(), values.end(), 0.0f);
  decode_add(encoded, values);
}

void TopKPayload::decode_add(std::span<const std::byte> encoded, std::span<float> values) const {
  if (values.empty() || add(encoded, values)) return;
  std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
}

// Whether that was an encoding; otherwise anything may have been added.
bool TopKPayload::add(std::span<const std::byte> encoded, std::span<float> values) const {
  if (encoded.empty()) return false;
  const auto form = std::to_integer<uint8_t>(encoded[0]);
  if ((form & 3) == kEntries) return add_entries(encoded, values);
  const auto count = static_cast<int64_t>(values.size());
  if (form != kAll || static_cast<int64_t>(encoded.size()) != 1 + value_bytes(count)) return false;
  std::array<float, kChunk> decoded;
  for (int64_t first = 0; first < count; first += kChunk) {
    const auto length = static_cast<size_t>(std::min(kChunk, count - first));
    decode_values(&encoded[1], first, {decoded.data(), length});
    for (size_t i = 0; i < length; ++i) values[first + i] += decoded[i];
  }
  return true;
}

bool TopKPayload::add_entries(std::span<const std::byte> encoded, std::span<float> values) const {
  const int order = std::to_integer<uint8_t>(encoded[0]) >> 2;
  if (order > kLargestGammaOrder || static_cast<int64_t>(encoded.size()) < kHeaderBytes) return false;
  uint32_t entries = 0;
  std::memcpy(&entries, &encoded[1], sizeof(entries));
  const int64_t first_place = kHeaderBytes + value_bytes(entries);
  if (entries > values.size() || static_cast<int64_t>(encoded.size()) < first_place) return false;
  GammaReader reader(encoded.subspan(static_cast<size_t>(first_place)));
  std::array<uint32_t, kChunk> places;
  std::array<float, kChunk> decoded;
  uint64_t next = 0;  // place after the last one
  for (int64_t first = 0; first < entries; first += kChunk) {
    const auto length = static_cast<size_t>(std::min(kChunk, entries - first));
    // Two loops: most places are cache misses, and a short loop has many of them on the way at once.
    for (size_t i = 0; i < length; ++i) {
      const uint32_t step = reader.read(order);
      next += step;
      if (step == 0 || next > values.size()) return false;
      places[i] = static_cast<uint32_t>(next - 1);
      __builtin_prefetch(&values[next - 1], 1);
    }
    decode_values(&encoded[kHeaderBytes], first, {decoded.data(), length});
    for (size_t i = 0; i < length; ++i) values[places[i]] += decoded[i];
  }
  return reader.is_at_end();
}

}  // namespace zeropg

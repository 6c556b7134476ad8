// Elias-gamma codes of the numbers 1, 2, 3, ... and their generalization with an order (exponential Golomb codes):
// small numbers take few bits, and no table travels.
//
// At order 0 a number with z bits below its highest one is z zeros, a one, and those z bits. At order p the lowest p
// bits of number - 1 follow as they are, behind the code of (number - 1) / 2^p + 1. Bits fill bytes from the lowest up.
//
// Sources: Elias, "Universal codeword sets and representations of the integers" (1975); Teuhola, "A compression method
// for clustered bit-vectors" (1978).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace zeropg {

static_assert(std::endian::native == std::endian::little, "encodings are little-endian and copied as they are");

inline constexpr int kLargestGammaOrder = 31;

// How long the code of `number` is, which is at least 1; at most 63 bits.
inline int gamma_bits(uint32_t number, int order) {
  const uint64_t quotient = (static_cast<uint64_t>(number - 1) >> order) + 1;
  return 2 * (std::bit_width(quotient) - 1) + 1 + order;
}

// Writes codes one behind the other, eight bytes at a time. There must be room for what is written.
class GammaWriter {
 public:
  explicit GammaWriter(std::byte* place) : place_(place) {}

  void write(uint32_t number, int order) {
    const uint64_t rest = number - 1;
    const uint64_t quotient = (rest >> order) + 1;
    const int zeros = std::bit_width(quotient) - 1;
    const uint64_t below = quotient - (uint64_t{1} << zeros);
    const uint64_t low = rest & ((uint64_t{1} << order) - 1);
    // Two shifts at the end: the length of a part alone may be 63, with nothing behind it.
    append(uint64_t{1} << zeros | below << zeros << 1 | low << zeros << zeros << 1, 2 * zeros + 1 + order);
  }

  // Writes the bits that wait; returns the end.
  std::byte* finish() {
    const auto bytes = static_cast<size_t>((waiting_ + 7) / 8);
    std::memcpy(place_, &buffer_, bytes);
    place_ += bytes;
    buffer_ = 0;
    waiting_ = 0;
    return place_;
  }

 private:
  void append(uint64_t code, int length) {
    buffer_ |= code << waiting_;
    waiting_ += length;
    if (waiting_ < 64) return;
    std::memcpy(place_, &buffer_, sizeof(buffer_));
    place_ += sizeof(buffer_);
    waiting_ -= 64;
    buffer_ = code >> (length - waiting_);  // waiting_ < length <= 63
  }

  std::byte* place_;
  uint64_t buffer_ = 0;
  int waiting_ = 0;  // bits in the buffer, below 64
};

// Reads codes that anybody may have written: never beyond the end.
class GammaReader {
 public:
  explicit GammaReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // The next number; 0 where the bytes end before its code does or where it would be beyond 32 bits.
  uint32_t read(int order) {
    const uint64_t start = peek();
    if (start == 0) return 0;
    const int zeros = std::countr_zero(start);
    const int length = 2 * zeros + 1 + order;
    if (zeros + order > 31 || at_ + length > 8 * static_cast<int64_t>(bytes_.size())) return 0;
    at_ += zeros + 1;
    const uint64_t rest = length <= kPeekBits ? start >> zeros >> 1 : peek();  // at most 32 + 31 bits
    at_ += zeros + order;
    const uint64_t quotient = (uint64_t{1} << zeros) + (rest & ((uint64_t{1} << zeros) - 1));
    const uint64_t low = rest >> zeros & ((uint64_t{1} << order) - 1);
    return static_cast<uint32_t>(((quotient - 1) << order) + low + 1);
  }

  // Whether nothing but the zeros that fill the last byte is left.
  bool is_at_end() const { return 8 * static_cast<int64_t>(bytes_.size()) - at_ < 8 && peek() == 0; }

 private:
  static constexpr int kPeekBits = 57;

  // The next kPeekBits bits at least, as far as there are any; zeros behind them.
  uint64_t peek() const {
    const auto first = static_cast<size_t>(at_ / 8);
    uint64_t word = 0;
    if (first + sizeof(word) <= bytes_.size()) {
      std::memcpy(&word, bytes_.data() + first, sizeof(word));
    } else if (first < bytes_.size()) {
      std::memcpy(&word, bytes_.data() + first, bytes_.size() - first);
    }
    return word >> at_ % 8;
  }

  std::span<const std::byte> bytes_;
  int64_t at_ = 0;  // bits read
};

}  // namespace zeropg

#include "sharding/checkpoint/checksum.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropg {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;   // 0x1edc6f41 with the bits reversed, as the CRC itself is kept
constexpr uint32_t kOne = uint32_t{1} << 31;   // x^0
constexpr uint32_t kByte = uint32_t{1} << 23;  // x^8

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & kOne) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(8 bytes)
uint32_t shift_by(uint64_t bytes) {
  uint32_t result = kOne;
  for (uint32_t square = kByte; bytes != 0; bytes >>= 1) {
    if (bytes & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
uint64_t word_at(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// One instruction takes 3 cycles and could begin in each of them: so three stretches run beside each other, and their
// checksums are joined.
constexpr size_t kStretch = 4096;

__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  static const uint32_t kPastOne = shift_by(kStretch);
  static const uint32_t kPastTwo = shift_by(2 * kStretch);
  uint64_t state = ~crc;
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= 3 * kStretch; left -= 3 * kStretch, data += 3 * kStretch) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t at = 0; at < kStretch; at += sizeof(uint64_t)) {
      state = _mm_crc32_u64(state, word_at(data + at));
      second = _mm_crc32_u64(second, word_at(data + kStretch + at));
      third = _mm_crc32_u64(third, word_at(data + 2 * kStretch + at));
    }
    state =
        multiply(kPastTwo, static_cast<uint32_t>(state)) ^ multiply(kPastOne, static_cast<uint32_t>(second)) ^ third;
  }
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    state = _mm_crc32_u64(state, word_at(data));
  }
  for (; left > 0; --left, ++data) {
    state = _mm_crc32_u8(static_cast<uint32_t>(state), static_cast<uint8_t>(*data));
  }
  return ~static_cast<uint32_t>(state);
}
#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return crc32c_by_instruction(bytes, crc);
#endif
  return crc32c_by_table(bytes, crc);
}

uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t state = ~crc;
  for (const std::byte byte : bytes) {
    state = (state >> 8) ^ kTable[(state ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~state;
}

uint32_t join_crc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiply(shift_by(second_bytes), first) ^ second;
}

ChunkChecksums::ChunkChecksums(uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
  TORCH_CHECK_VALUE(chunk_bytes > 0, "chunk_bytes is 0; expected a positive number");
}

void ChunkChecksums::add(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t count = std::min<uint64_t>(bytes.size(), chunk_bytes_ - offset % chunk_bytes_);
    const bool continues = offset % chunk_bytes_ != 0 && !pieces_.empty() && pieces_.back().stop == offset;
    if (!continues) pieces_.push_back({offset, offset, 0});
    ChecksumPiece& piece = pieces_.back();
    piece.crc = crc32c(bytes.first(count), piece.crc);
    piece.stop += count;
    offset += count;
    bytes = bytes.subspan(count);
  }
}

std::vector<uint32_t> join_pieces(std::vector<ChecksumPiece> pieces, uint64_t file_bytes, uint64_t chunk_bytes) {
  TORCH_CHECK_VALUE(chunk_bytes > 0, "chunk_bytes is 0; expected a positive number");
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.start < b.start; });
  std::vector<uint32_t> checksums;
  uint64_t end = 0;
  for (const ChecksumPiece& piece : pieces) {
    TORCH_CHECK_VALUE(piece.start == end, "bytes [", std::min(end, piece.start), ", ", std::max(end, piece.start),
                      ") were written ", piece.start < end ? "twice" : "by no rank");
    TORCH_CHECK_VALUE(piece.start < piece.stop && piece.stop <= file_bytes &&
                          piece.start / chunk_bytes == (piece.stop - 1) / chunk_bytes,
                      "the piece [", piece.start, ", ", piece.stop, ") is not inside one chunk of the file");
    if (piece.start % chunk_bytes == 0) {
      checksums.push_back(piece.crc);
    } else {
      checksums.back() = join_crc32c(checksums.back(), piece.crc, piece.stop - piece.start);
    }
    end = piece.stop;
  }
  TORCH_CHECK_VALUE(end == file_bytes, "bytes [", end, ", ", file_bytes, ") were written by no rank");
  return checksums;
}

}  // namespace zeropg

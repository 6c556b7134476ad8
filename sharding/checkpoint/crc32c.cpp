#include "sharding/checkpoint/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#include "backend/platform/cpu/instruction_sets.h"

// GCC's own extraction of a lane reads an undefined register on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace zeropg {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41 with the bits reversed, as the CRC itself is kept
constexpr uint32_t kOne = uint32_t{1} << 31;  // x^0
constexpr uint32_t kX = uint32_t{1} << 30;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & kOne) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t result = kOne;
  for (uint32_t square = kX; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
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

uint32_t extend_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t state = ~crc;
  for (const std::byte byte : bytes) {
    state = (state >> 8) ^ kTable[(state ^ static_cast<uint32_t>(byte)) & 0xff];
  }
  return ~state;
}

#if defined(__x86_64__)
uint64_t word_at(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// `state` is the CRC before its last inversion.
__attribute__((target("sse4.2"))) uint32_t extend_state(std::span<const std::byte> bytes, uint64_t state) {
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    state = _mm_crc32_u64(state, word_at(data));
  }
  for (; left > 0; --left, ++data) {
    state = _mm_crc32_u8(static_cast<uint32_t>(state), static_cast<uint8_t>(*data));
  }
  return static_cast<uint32_t>(state);
}

// One instruction takes 3 cycles and could begin in each of them: so three stretches run beside each other, and their
// checksums are joined.
constexpr size_t kStretch = 4096;

__attribute__((target("sse4.2"))) uint32_t extend_by_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  constexpr uint32_t kPastOne = power_of_x(8 * kStretch);
  constexpr uint32_t kPastTwo = power_of_x(16 * kStretch);
  uint64_t state = ~crc;
  for (; bytes.size() >= 3 * kStretch; bytes = bytes.subspan(3 * kStretch)) {
    const std::byte* data = bytes.data();
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
  return ~extend_state(bytes, state);
}

// Folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"): 16 bytes are
// replaced by 16 bytes that stand `bits` later and have the same remainder. The product of two reversed polynomials of
// 64 and 32 bits lies 33 bits from where 128 reversed bits begin.
#define ZEROPG_FOLDS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,pclmul,vpclmulqdq,sse4.2")))

ZEROPG_FOLDS __m512i fold(__m512i lanes, __m512i factors, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, factors, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, factors, 0x11), next, 0x96);
}

template <uint64_t kBits>
__m128i factors_for() {
  return _mm_set_epi64x(power_of_x(kBits - 33), power_of_x(kBits + 64 - 33));
}

ZEROPG_FOLDS uint32_t extend_by_folding(std::span<const std::byte> bytes, uint32_t crc) {
  constexpr size_t kVector = 64;
  constexpr size_t kRound = 8 * kVector;
  if (bytes.size() < 2 * kRound) return extend_by_instruction(bytes, crc);

  // Eight vectors, each replaced by one that stands a round later.
  std::array<__m512i, 8> state;
  for (size_t i = 0; i < state.size(); ++i) state[i] = _mm512_loadu_si512(bytes.data() + i * kVector);
  state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
  const __m512i round = _mm512_broadcast_i32x4(factors_for<8 * kRound>());
  for (bytes = bytes.subspan(kRound); bytes.size() >= kRound; bytes = bytes.subspan(kRound)) {
    for (size_t i = 0; i < state.size(); ++i) {
      state[i] = fold(state[i], round, _mm512_loadu_si512(bytes.data() + i * kVector));
    }
  }

  // Into the last of them, and that into 16 bytes.
  const __m512i vector = _mm512_broadcast_i32x4(factors_for<8 * kVector>());
  for (size_t i = 1; i < state.size(); ++i) state[i] = fold(state[i - 1], vector, state[i]);
  alignas(64) std::array<__m128i, 4> parts;
  _mm512_store_si512(parts.data(), state.back());
  const __m128i lane = factors_for<128>();
  for (size_t i = 1; i < parts.size(); ++i) {
    parts[i] = _mm_xor_si128(parts[i], _mm_xor_si128(_mm_clmulepi64_si128(parts[i - 1], lane, 0x00),
                                                     _mm_clmulepi64_si128(parts[i - 1], lane, 0x11)));
  }
  const std::span rest(reinterpret_cast<const std::byte*>(&parts.back()), sizeof(__m128i));
  return ~extend_state(bytes, extend_state(rest, 0));
}

// Without AVX-512 a core multiplies vectors of 32 bytes at the rate of the CRC instruction, and on other units: so the
// first part of a block is folded while three stretches after it take the instruction.
#define ZEROPG_FOLDS_HALVES __attribute__((target("avx2,pclmul,vpclmulqdq,sse4.2")))

ZEROPG_FOLDS_HALVES __m256i fold(__m256i lanes, __m256i factors, __m256i next) {
  return _mm256_xor_si256(next, _mm256_xor_si256(_mm256_clmulepi64_epi128(lanes, factors, 0x00),
                                                 _mm256_clmulepi64_epi128(lanes, factors, 0x11)));
}

ZEROPG_FOLDS_HALVES __m256i half_at(const std::byte* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

ZEROPG_FOLDS_HALVES uint32_t extend_both_ways(std::span<const std::byte> bytes, uint32_t crc) {
  constexpr size_t kHalf = sizeof(__m256i);
  constexpr size_t kFolded = 4 * kHalf;            // in a round
  constexpr size_t kWords = 5 * sizeof(uint64_t);  // likewise, of each stretch
  constexpr size_t kRounds = 264;
  constexpr size_t kPart = kRounds * kWords;
  constexpr size_t kBlock = kRounds * kFolded + 3 * kPart;  // 64 bytes less than 64 KiB
  constexpr uint32_t kPastOne = power_of_x(8 * kPart);
  constexpr uint32_t kPastTwo = power_of_x(16 * kPart);
  constexpr uint32_t kPastThree = power_of_x(24 * kPart);
  const __m256i round = _mm256_broadcastsi128_si256(factors_for<8 * kFolded>());
  const __m256i half = _mm256_broadcastsi128_si256(factors_for<8 * kHalf>());
  const __m128i lane = factors_for<128>();
  for (; bytes.size() >= kBlock; bytes = bytes.subspan(kBlock)) {
    const std::byte* data = bytes.data();
    std::array<__m256i, 4> state;
    for (size_t i = 0; i < state.size(); ++i) state[i] = half_at(data + i * kHalf);
    state[0] = _mm256_xor_si256(state[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(~crc))));
    const std::byte* part = data + kRounds * kFolded;
    std::array<uint64_t, 3> parts{};
    // The last round has nothing left to fold.
    for (size_t number = 1; number <= kRounds; ++number, part += kWords) {
      for (size_t at = 0; at < kWords; at += sizeof(uint64_t)) {
        for (size_t i = 0; i < parts.size(); ++i) parts[i] = _mm_crc32_u64(parts[i], word_at(part + i * kPart + at));
      }
      if (number == kRounds) break;
      data += kFolded;
      for (size_t i = 0; i < state.size(); ++i) state[i] = fold(state[i], round, half_at(data + i * kHalf));
    }

    // The vectors into the last of them, that into 16 bytes, and their checksum with those of the stretches.
    for (size_t i = 1; i < state.size(); ++i) state[i] = fold(state[i - 1], half, state[i]);
    const __m128i low = _mm256_castsi256_si128(state.back());
    const __m128i end =
        _mm_xor_si128(_mm256_extracti128_si256(state.back(), 1),
                      _mm_xor_si128(_mm_clmulepi64_si128(low, lane, 0x00), _mm_clmulepi64_si128(low, lane, 0x11)));
    const uint32_t folded = extend_state({reinterpret_cast<const std::byte*>(&end), sizeof(end)}, 0);
    crc = ~(multiply(kPastThree, folded) ^ multiply(kPastTwo, static_cast<uint32_t>(parts[0])) ^
            multiply(kPastOne, static_cast<uint32_t>(parts[1])) ^ static_cast<uint32_t>(parts[2]));
  }
  return extend_by_instruction(bytes, crc);
}
#endif

// Made at load: a fork in the middle of a function's static would leave the child waiting for it.
class Kernels {
 public:
  Kernels() {
    add({"table", extend_by_table});
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2")) return;
    add({"sse4.2", extend_by_instruction});
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("vpclmulqdq")) return;
    if (has(Instructions::kAvx2)) add({"avx2 and sse4.2", extend_both_ways});
    if (has(Instructions::kAvx512)) add({"avx512", extend_by_folding});
#endif
  }
  std::span<const Crc32cKernel> all() const { return {usable_.data(), count_}; }

 private:
  void add(const Crc32cKernel& kernel) { usable_[count_++] = kernel; }

  std::array<Crc32cKernel, 4> usable_{};
  size_t count_ = 0;
};

const Kernels kernels;

}  // namespace

std::span<const Crc32cKernel> usable_crc32c() { return kernels.all(); }

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) { return kernels.all().back().extend(bytes, crc); }

uint32_t join_crc32c(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiply(power_of_x(8 * second_bytes), first) ^ second;
}

}  // namespace zeropg

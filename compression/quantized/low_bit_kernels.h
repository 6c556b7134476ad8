// The kernels behind OneBit and TwoBit: one table per instruction set, all compiled from low_bit_kernels.inc. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

enum class LowBitCode : uint8_t {
  kSign,              // 1 bit: the sign times the block's mean magnitude
  kRotatedSign,       // likewise, of the rotated block
  kTernary,           // 2 bits: 0, or plus or minus the mean of the large magnitudes
  kRotatedFourLevel,  // 2 bits: -1.5, -0.5, 0.5 or 1.5 steps, of the rotated block
};

// Largest block: what a kernel keeps on its stack while it looks at a block several times (16 KiB, inside the L1
// cache).
inline constexpr int64_t kLargestLowBitBlock = 4096;
// A rotated block is padded with zeros to a power of two, at least this: a vector of the widest instruction set.
inline constexpr int64_t kLeastRotatedBlock = 16;

// Codes that a block of `count` values has: rotated ones are padded.
constexpr int64_t low_bit_codes(LowBitCode code, int64_t count) {
  if (code != LowBitCode::kRotatedSign && code != LowBitCode::kRotatedFourLevel) return count;
  int64_t padded = kLeastRotatedBlock;
  while (padded < count) padded *= 2;
  return padded;
}
constexpr int64_t low_bits(LowBitCode code) {
  return code == LowBitCode::kSign || code == LowBitCode::kRotatedSign ? 1 : 2;
}
inline constexpr int64_t kLowBitScaleBytes = 2;
constexpr int64_t low_bit_block_bytes(LowBitCode code, int64_t count) {
  return count == 0 ? 0 : kLowBitScaleBytes + (low_bit_codes(code, count) * low_bits(code) + 7) / 8;
}

// `count` floats as blocks of `block` (the last may be shorter), packed one after another as README.md says.
// `residual` may be null.
struct LowBitKernels {
  void (*encode)(const float* values, float* residual, int64_t count, int64_t block, std::byte* encoded);
  void (*decode)(const std::byte* encoded, int64_t count, int64_t block, float* values);
  void (*decode_add)(const std::byte* encoded, int64_t count, int64_t block, float* values);
};

LowBitKernels portable_low_bit(LowBitCode code);
#if defined(__x86_64__)
LowBitKernels avx2_low_bit(LowBitCode code);
LowBitKernels avx512_low_bit(LowBitCode code);
#endif

// What this processor can run, the best last. All give the same bits.
struct LowBitSet {
  const char* name;
  LowBitKernels (*kernels)(LowBitCode code);
};
std::span<const LowBitSet> usable_low_bit_sets();

}  // namespace zeropg

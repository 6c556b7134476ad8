// The kernels behind BlockQuant: one table per instruction set, all compiled from block_quant_kernels.inc. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

// Largest block: what a kernel keeps on its stack while it looks at a block twice (16 KiB, inside the L1 cache).
inline constexpr int64_t kLargestQuantBlock = 4096;

// `count` floats as blocks of `block` (the last may be shorter), packed one after another as README.md says.
// `residual` may be null.
struct BlockQuantKernels {
  void (*encode)(const float* values, float* residual, int64_t count, int64_t block, std::byte* encoded);
  void (*decode)(const std::byte* encoded, int64_t count, int64_t block, float* values);
  void (*decode_add)(const std::byte* encoded, int64_t count, int64_t block, float* values);
};

// `bits`: 4 or 8.
BlockQuantKernels portable_block_quant(int bits);
#if defined(__x86_64__)
BlockQuantKernels avx2_block_quant(int bits);
BlockQuantKernels avx512_block_quant(int bits);
#endif

// What this processor can run, the best last. All give the same bits.
struct BlockQuantSet {
  const char* name;
  BlockQuantKernels (*kernels)(int bits);
};
std::span<const BlockQuantSet> usable_block_quant_sets();

}  // namespace zeropg

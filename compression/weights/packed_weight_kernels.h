// The kernels behind packed weights: one table per instruction set, all compiled from packed_weight_kernels.inc.
// Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "compression/quantized/block_quant_kernels.h"

namespace zeropg {

enum class WeightType : uint8_t { kFloat32, kBfloat16, kFloat16 };

// Values that the 4-bit codes 0 to 15 stand for, in units of a block's scale.
struct WeightLevels {
  float of_code[16];
};

// `count` values as blocks of `block` (the last may be shorter), one after another, each a bfloat16 scale and codes as
// README.md says of block_quant.
struct PackedWeightKernels {
  // The code of each value is the nearest level of NF4's.
  void (*encode_nf4)(const float* values, int64_t count, int64_t block, std::byte* encoded);
  // Any 4-bit code: values are levels times the scale, rounded once to fp32 and once more to `type`.
  void (*decode_4_bit)(const WeightLevels& levels, const std::byte* encoded, int64_t count, int64_t block,
                       WeightType type, void* out);
  // Rounds to nearest even; not for kFloat32.
  void (*narrow)(const float* values, int64_t count, WeightType type, void* out);
};

PackedWeightKernels portable_packed_weight();
#if defined(__x86_64__)
PackedWeightKernels avx2_packed_weight();
PackedWeightKernels avx512_packed_weight();
#endif

// What this processor can run, the best last. All give the same bits.
struct PackedWeightSet {
  const char* name;
  PackedWeightKernels (*kernels)();
  BlockQuantKernels (*block_quant)(int bits);  // for int4 and int8
};
std::span<const PackedWeightSet> usable_packed_weight_sets();

}  // namespace zeropg

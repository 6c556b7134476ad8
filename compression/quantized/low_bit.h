// One or two bits per value and one scale per block: signs, ternary codes, or four levels of a rotated block.
//
// Sources: signs with the block's mean magnitude, Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
// Compression Schemes" (section 4: the scale that makes it a contraction); ternary codes, Li et al., "Ternary Weight
// Networks" (section 2.2); the rotation, Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation" (section 3).
// The format and every edge case: README.md.
#pragma once

#include "compression/compressor.h"
#include "compression/quantized/low_bit_kernels.h"

namespace zeropg {

class LowBit final : public Compressor {
 public:
  static constexpr char kOneBitHelp[] =
      R"(Signs, with one scale per block: 3.2 % of fp32's bytes. Needs error feedback, and an optimizer that bears it.

    block: elements per scale, a multiple of 64 up to 4096; with rotate a power of two.
    rotate: mix the values of a block before their signs are taken. What a few large ones lose is then shared by all,
      and residuals stay small; it costs a third of the speed.
    entropy: refused, since signs of gradients have none to save (1.00 to 1.02 times fewer bytes were measured).

    Raises ValueError for other values.)";
  static constexpr char kTwoBitHelp[] =
      R"(Two bits per value, with one scale per block: 6.3 % of fp32's bytes. Needs error feedback.

    block: elements per scale, a multiple of 64 up to 4096; with rotate a power of two.
    rotate: False: 0, or plus or minus the mean of what is above 0.7 times the mean magnitude. True: four levels of
      the mixed values of a block, which lose less and cost more time.
    entropy: pack the codes with Huffman's code where that is shorter: a quarter fewer bytes, about 1 GB/s per core.

    Raises ValueError for other values.)";

  // `block`: a multiple of 64 up to kLargestLowBitBlock, for rotated codes a power of two. std::invalid_argument.
  // `set` is for tests: it changes the speed, never the bits.
  LowBit(LowBitCode code, int64_t block, const LowBitSet& set = usable_low_bit_sets().back());

  std::string description() const override;
  int64_t block_elements() const override { return block_; }
  int64_t capacity_bytes(int64_t count) const override;
  int64_t encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const override;
  void decode(std::span<const std::byte> encoded, std::span<float> values) const override;
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override;

 private:
  LowBitCode code_;
  int64_t block_;
  LowBitKernels kernels_{};
};

}  // namespace zeropg

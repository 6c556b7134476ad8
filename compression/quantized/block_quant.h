// Symmetric integers in blocks: each block of floats has one scale, largest magnitude / 127 (8 bits) or / 7 (4 bits),
// and each float is its code, the nearest multiple of the scale. 4.06 bits per float at 4 bits and blocks of 256.
//
// Source: block-wise quantization as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (section 2.1),
// with linear codes as in DeepSpeed's ZeRO++ (section 3.3). The format and every edge case: README.md.
#pragma once

#include "compression/compressor.h"
#include "compression/quantized/block_quant_kernels.h"

namespace zeropg {

class BlockQuant final : public Compressor {
 public:
  static constexpr char kHelp[] = R"(Integers of 8 or 4 bits with one scale per block: 25.2 % or 12.7 % of fp32's bytes.

    bits: 8, which training does not notice, or 4, which it hardly does.
    block: elements per scale, a multiple of 32 up to 4096.
    entropy: pack the codes with Huffman's code where that is shorter: a quarter fewer bytes with 4 bits, at about
      1 GB/s per core.

    Raises ValueError for other values.)";

  // `bits`: 4 or 8. `block`: elements per scale, a multiple of 32 up to kLargestQuantBlock. std::invalid_argument.
  // `set` is for tests: it changes the speed, never the bits.
  BlockQuant(int64_t bits, int64_t block, const BlockQuantSet& set = usable_block_quant_sets().back());

  std::string description() const override;
  int64_t block_elements() const override { return block_; }
  int64_t capacity_bytes(int64_t count) const override;
  int64_t encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const override;
  void decode(std::span<const std::byte> encoded, std::span<float> values) const override;
  void decode_add(std::span<const std::byte> encoded, std::span<float> values) const override;

 private:
  int64_t bits_;
  int64_t block_;
  BlockQuantKernels kernels_{};
};

}  // namespace zeropg

#include "compression/quantized/block_quant.h"

#include <stdexcept>

#include "backend/platform/cpu/instruction_sets.h"

namespace zeropg {

namespace {

constexpr int64_t kScaleBytes = 2;  // a bfloat16: the range of fp32, so that small gradients keep their scale

const UsableKernels<BlockQuantSet> kernels {
  {Instructions::kPortable, {"portable", portable_block_quant}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_block_quant}}, {Instructions::kAvx512, {"avx512", avx512_block_quant}},
#endif
};

}  // namespace

std::span<const BlockQuantSet> usable_block_quant_sets() { return kernels.all(); }

BlockQuant::BlockQuant(int64_t bits, int64_t block, const BlockQuantSet& set) : bits_(bits), block_(block) {
  if (bits != 4 && bits != 8) {
    throw std::invalid_argument("block_quant: bits is " + std::to_string(bits) + ", expected 4 or 8");
  }
  if (block < 32 || block > kLargestQuantBlock || block % 32 != 0) {
    throw std::invalid_argument("block_quant: block is " + std::to_string(block) +
                                ", expected a multiple of 32 up to " + std::to_string(kLargestQuantBlock) +
                                "; 256 is a good one");
  }
  kernels_ = set.kernels(static_cast<int>(bits));
}

std::string BlockQuant::description() const {
  return "block_quant(bits=" + std::to_string(bits_) + ", block=" + std::to_string(block_) + ")";
}

int64_t BlockQuant::capacity_bytes(int64_t count) const {
  const int64_t rest = count % block_;
  const int64_t rest_bytes = rest == 0 ? 0 : kScaleBytes + (rest * bits_ + 7) / 8;
  return count / block_ * (kScaleBytes + block_ * bits_ / 8) + rest_bytes;
}

int64_t BlockQuant::encode(std::span<const float> values, std::span<float> residual,
                           std::span<std::byte> encoded) const {
  const auto count = static_cast<int64_t>(values.size());
  kernels_.encode(values.data(), residual.empty() ? nullptr : residual.data(), count, block_, encoded.data());
  return capacity_bytes(count);
}

void BlockQuant::decode(std::span<const std::byte> encoded, std::span<float> values) const {
  kernels_.decode(encoded.data(), static_cast<int64_t>(values.size()), block_, values.data());
}

void BlockQuant::decode_add(std::span<const std::byte> encoded, std::span<float> values) const {
  kernels_.decode_add(encoded.data(), static_cast<int64_t>(values.size()), block_, values.data());
}

}  // namespace zeropg

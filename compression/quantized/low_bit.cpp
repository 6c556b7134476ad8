#include "compression/quantized/low_bit.h"

#include <bit>
#include <stdexcept>

#include "backend/platform/cpu/instruction_sets.h"

namespace zeropg {

namespace {

const UsableKernels<LowBitSet> kernels {
  {Instructions::kPortable, {"portable", portable_low_bit}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_low_bit}}, {Instructions::kAvx512, {"avx512", avx512_low_bit}},
#endif
};

const char* name_of(LowBitCode code) { return low_bits(code) == 1 ? "one_bit" : "two_bit"; }

bool is_rotated(LowBitCode code) { return code == LowBitCode::kRotatedSign || code == LowBitCode::kRotatedFourLevel; }

}  // namespace

std::span<const LowBitSet> usable_low_bit_sets() { return kernels.all(); }

LowBit::LowBit(LowBitCode code, int64_t block, const LowBitSet& set) : code_(code), block_(block) {
  const bool is_block = block >= 64 && block <= kLargestLowBitBlock && block % 64 == 0;
  if (!is_block || (is_rotated(code) && !std::has_single_bit(static_cast<uint64_t>(block)))) {
    throw std::invalid_argument(std::string(name_of(code)) + ": block is " + std::to_string(block) + ", expected a " +
                                (is_rotated(code) ? "power of two from 64" : "multiple of 64") + " up to " +
                                std::to_string(kLargestLowBitBlock) + "; 1024 is a good one");
  }
  kernels_ = set.kernels(code);
}

std::string LowBit::description() const {
  return std::string(name_of(code_)) + "(block=" + std::to_string(block_) +
         (is_rotated(code_) ? ", rotate=True)" : ")");
}

int64_t LowBit::capacity_bytes(int64_t count) const {
  return count / block_ * low_bit_block_bytes(code_, block_) + low_bit_block_bytes(code_, count % block_);
}

int64_t LowBit::encode(std::span<const float> values, std::span<float> residual, std::span<std::byte> encoded) const {
  const auto count = static_cast<int64_t>(values.size());
  kernels_.encode(values.data(), residual.empty() ? nullptr : residual.data(), count, block_, encoded.data());
  return capacity_bytes(count);
}

void LowBit::decode(std::span<const std::byte> encoded, std::span<float> values) const {
  kernels_.decode(encoded.data(), static_cast<int64_t>(values.size()), block_, values.data());
}

void LowBit::decode_add(std::span<const std::byte> encoded, std::span<float> values) const {
  kernels_.decode_add(encoded.data(), static_cast<int64_t>(values.size()), block_, values.data());
}

}  // namespace zeropg

// Kernels for every processor.
#include "compression/weights/nf4_levels.h"
#include "compression/weights/packed_weight_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")

namespace zeropg {
namespace {

template <typename T>
int64_t look_up(const T* table, const uint8_t* codes, int64_t pairs, T* low, T* high) {
  for (int64_t i = 0; i < pairs; ++i) {
    low[i] = table[codes[i] & 15];
    high[i] = table[codes[i] >> 4];
  }
  return pairs;
}

}  // namespace
}  // namespace zeropg

#include "compression/weights/packed_weight_kernels.inc"

namespace zeropg {

PackedWeightKernels portable_packed_weight() { return kKernels; }

}  // namespace zeropg

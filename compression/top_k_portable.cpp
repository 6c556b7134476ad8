// Kernels for every processor.
#include "compression/top_k_kernels.h"

#pragma GCC optimize("O3", "fp-contract=off")

namespace zeropg {
namespace {

struct Lanes {
  static constexpr int64_t kLanes = 1;
  static uint32_t zeros() { return 0; }
  static uint32_t bound(uint32_t at_least) { return at_least; }
  static uint32_t load(const float* values) { return __builtin_bit_cast(uint32_t, *values) & 0x7fffffff; }
  static uint32_t load_sum(const float* values, const float* others) {
    return __builtin_bit_cast(uint32_t, *values + *others) & 0x7fffffff;
  }
  static uint32_t indices(uint32_t first) { return first; }
  static uint32_t highest(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static bool mask_of(uint32_t lanes, uint32_t bound) { return lanes >= bound; }
  static int64_t pack(uint32_t* out, uint32_t lanes, bool mask) {
    *out = lanes;
    return mask;
  }
  static void store(uint32_t* out, uint32_t lanes) { *out = lanes; }
};

}  // namespace
}  // namespace zeropg

#include "compression/top_k_kernels.inc"

namespace zeropg {

TopKKernels portable_top_k() { return kKernels; }

}  // namespace zeropg

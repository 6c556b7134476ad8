// What top-k does to every value: one table per instruction set, all compiled from top_k_kernels.inc. Internal.
#pragma once

#include <cstdint>
#include <span>

namespace zeropg {

// A kernel writes what it finds a vector at a time, so up to this many entries beyond those it returns.
inline constexpr int64_t kTopKSlack = 16;

// A magnitude is the bits of a float without its sign: in the order of the absolute values, with infinity and NaN on
// top. `at_least` is never 0.
struct TopKKernels {
  // magnitudes <- those of values + residual (may be null) that are at least `at_least`, places <- their indices, both
  // in order. Returns how many there are and raises `largest` to the largest magnitude of all.
  int64_t (*find)(const float* values, const float* residual, int64_t count, uint32_t at_least, uint32_t* magnitudes,
                  uint32_t* places, uint32_t* largest);
  // residual <- values + residual
  void (*add)(const float* values, float* residual, int64_t count);
};

TopKKernels portable_top_k();
#if defined(__x86_64__)
TopKKernels avx2_top_k();
TopKKernels avx512_top_k();
#endif

// What this processor can run, the best last. All give the same bits.
struct TopKSet {
  const char* name;
  TopKKernels (*kernels)();
};
std::span<const TopKSet> usable_top_k_sets();

}  // namespace zeropg

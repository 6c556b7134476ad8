// Which of the instruction sets that kernels are written for this processor has.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zeropg {

// avx2: with f16c. avx512: F, BW, VL and DQ, as all server processors since 2017; and VNNI, as those since 2019.
enum class Instructions { kPortable, kAvx2, kAvx512, kAvx512Vnni };

#if defined(__x86_64__)
inline bool has_f16c() {  // clang's __builtin_cpu_supports does not know it
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

inline bool has(Instructions instructions) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  switch (instructions) {
    case Instructions::kPortable:
      return true;
    case Instructions::kAvx2:
      return has_avx2;
    case Instructions::kAvx512:
      return has_avx512;
    case Instructions::kAvx512Vnni:
      return has_avx512 && __builtin_cpu_supports("avx512vnni");
  }
  return false;
#else
  return instructions == Instructions::kPortable;
#endif
}

// One algorithm's kernels, of type Set, by instruction set: those that can run here. Make it at load:
// a fork in the middle of a function's static would leave the child waiting for it.
template <typename Set>
class UsableKernels {
 public:
  struct Candidate {
    Instructions needs;
    Set kernels;
  };

  // Slowest first; the first one runs everywhere. At most three.
  UsableKernels(std::initializer_list<Candidate> candidates) {
    for (const Candidate& candidate : candidates) {
      if (has(candidate.needs)) usable_[count_++] = candidate.kernels;
    }
  }

  std::span<const Set> all() const { return {usable_.data(), count_}; }

 private:
  std::array<Set, 3> usable_{};
  size_t count_ = 0;
};

}  // namespace zeropg

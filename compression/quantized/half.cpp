#include "compression/quantized/half.h"

#include "backend/platform/cpu/instruction_sets.h"

namespace zeropg {

namespace {

const UsableKernels<HalfSet> kernels {
  {Instructions::kPortable, {"portable", portable_half}},
#if defined(__x86_64__)
      {Instructions::kAvx2, {"avx2", avx2_half}}, {Instructions::kAvx512, {"avx512", avx512_half}},
#endif
};

}  // namespace

std::span<const HalfSet> usable_half_sets() { return kernels.all(); }

}  // namespace zeropg

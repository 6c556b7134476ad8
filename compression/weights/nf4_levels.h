// The code book of NF4: quantiles of a normal distribution, scaled to -1 to 1, with an exact zero. From appendix E of
// Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314).
#pragma once

#include "compression/weights/packed_weight_kernels.h"

namespace zeropg {

inline constexpr WeightLevels kNf4Levels = {
    {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
     0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}};

}  // namespace zeropg

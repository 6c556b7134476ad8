// The one table that says what a ZeRO stage shards (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models", section 5). No other file tests the number of the stage.
#pragma once

#include <array>
#include <cstdint>

namespace zeropg {

struct Stage {
  int32_t number;
  bool shards_optimizer;   // masters and optimizer state: each rank updates its own slice only
  bool shards_gradients;   // gradients are reduce-scattered and kept as a slice
  bool shards_parameters;  // parameters are kept as a slice and made whole only while a unit runs
};

inline constexpr std::array<Stage, 4> kStages = {{
    {0, false, false, false},
    {1, true, false, false},
    {2, true, true, false},
    {3, true, true, true},
}};

}  // namespace zeropg

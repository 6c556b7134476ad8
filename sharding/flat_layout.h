// Where each parameter of a unit lies in the unit's flat buffer. A pure function of the sizes and the world size.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/platform/memory/round_up.h"

namespace zeropg {

// Offsets do not depend on stage or world size (only the padding at the end does), so that blocks, SIMD lanes and with
// them every rounding are the same in every stage. 32 elements are 64 bytes in the smallest trainable dtype.
inline constexpr int64_t kAlignmentNumel = 32;

struct FlatLayout {
  std::vector<int64_t> offsets;  // elements, one per parameter
  int64_t total_numel = 0;       // a multiple of world_size * kAlignmentNumel
  int64_t shard_numel = 0;       // total_numel / world_size; rank r owns [r * shard_numel, (r + 1) * shard_numel)
};

inline FlatLayout make_flat_layout(const std::vector<int64_t>& numels, int64_t world_size) {
  FlatLayout layout;
  int64_t end = 0;
  for (int64_t numel : numels) {
    layout.offsets.push_back(end);
    end += round_up(numel, kAlignmentNumel);
  }
  layout.total_numel = round_up(end, world_size * kAlignmentNumel);
  layout.shard_numel = layout.total_numel / world_size;
  return layout;
}

}  // namespace zeropg

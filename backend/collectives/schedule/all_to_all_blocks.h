// Where the blocks of an all-to-all lie in the caller's tensors.
#pragma once

#include <vector>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// By peer: the first byte of the block for it, and of the block from it.
struct AllToAllBlocks {
  std::vector<Region> sources;
  std::vector<Region> destinations;
};
// Throws std::invalid_argument when the counts do not fit the world.
AllToAllBlocks all_to_all_blocks(const CollectiveSpec& spec);

}  // namespace zeropg

// How errors of a group that is not the world say which global ranks its ranks are.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropg {

// By rank of the group; {4, 6, 8, 10} gives " of global ranks 4 to 10 by 2", {1, 3} " of global ranks 1, 3". "" where
// they are the same ranks, or none are given. Kept for good: as many as a program has different groups.
const char* describe_members(const std::vector<uint64_t>& global_ranks);

}  // namespace zeropg

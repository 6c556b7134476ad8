// How many elements may be whole beyond what runs, where units are gathered. The same on every rank.
#pragma once

#include <cstdint>
#include <limits>

namespace zeropg {

struct UnitLimits {
  int64_t prefetch_numel = 1;    // gathered ahead: one unit, and more while they have so many together; 0: none
  int64_t keep_numel = 0;        // kept from a forward to its backward, together
  int64_t persistent_numel = 0;  // of a unit that stays whole from one update to the next
  // Whole or on the way at once. What a program needs at the moment is always allowed.
  int64_t max_whole_numel = std::numeric_limits<int64_t>::max();
};

}  // namespace zeropg

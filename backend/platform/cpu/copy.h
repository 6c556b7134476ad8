// Copying bytes that nobody will read soon.
#pragma once

#include <cstdint>

namespace zeropg {

// Outputs from this size on (of a whole operation, all ranks of the node together) are better written past the caches:
// they would evict what is shared and be gone themselves before their reader comes. For small ones it is slower
// (64 KiB on two ranks: 3.3 us instead of 1.6 us).
inline constexpr int64_t kStreamingBytes = 8 << 20;

// memcpy; with `is_streaming` through non-temporal stores, complete and ordered before any later store when it returns.
void copy_bytes(void* destination, const void* source, int64_t bytes, bool is_streaming);

}  // namespace zeropg

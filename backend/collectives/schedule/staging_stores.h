// How bytes get from the core that stages them to the one that reads them next.
#pragma once

#include <cstdint>

namespace zeropg {

// Whether `bytes` that are staged at once had better be stored past the caches (copy.h). On AMD's processors a line
// that another core has modified comes over the fabric, about 2 GB/s of them; from memory it comes 3 to 4 times as fast
// (64 MiB all-gathered by two ranks of an EPYC in chunks of 128 KiB: 13 ms instead of 38 ms), but later: below 8 KiB it
// takes up to half as long again. Intel's share their last cache, which the staging banks then never leave.
bool should_stream_to_staging(int64_t bytes);

}  // namespace zeropg

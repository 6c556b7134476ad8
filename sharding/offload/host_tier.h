// Host memory: for models that compute on a GPU. The CPU works on it in place.
#pragma once

#include <memory>

#include "sharding/offload/tier.h"

namespace zeropg {

// `is_pinned`: in page-locked memory of torch's CUDA allocator, which rounds an extent up to a power of two; a GPU then
// copies from and to it without a stop in between. RuntimeError where torch has no CUDA.
std::unique_ptr<Tier> make_host_tier(bool is_pinned);

}  // namespace zeropg

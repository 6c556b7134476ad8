// The tiers, by the name of the device that users write.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "sharding/offload/file_tier.h"
#include "sharding/offload/tier.h"

namespace zeropg {

struct TierOptions {
  bool is_pinned = false;  // host memory
  FileTierOptions file;    // a file
};

// "cpu" or "nvme". ValueError with the list of known names for another; otherwise what the maker throws.
std::unique_ptr<Tier> make_tier(std::string_view device, const TierOptions& options);

std::vector<std::string_view> tier_devices();

}  // namespace zeropg

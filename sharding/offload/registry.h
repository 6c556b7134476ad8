// The tiers, by the name of the device that users write.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "sharding/offload/file_tier.h"
#include "sharding/offload/tier.h"

namespace zeropg {

// What a tier is: whoever opens, plans or measures tiers asks this, never a name.
struct TierTraits {
  std::string_view device;      // the name that users write
  bool has_path = false;        // it lies in a directory that users name
  bool is_host_memory = false;  // beside a model on the CPU: the memory that computes, so that there is nothing to move
};

// Each tier reads its own.
struct TierOptions {
  bool is_pinned = false;  // host memory
  FileTierOptions file;    // a file
};

// ValueError with the list of known names for an unknown device; otherwise what the maker throws.
std::unique_ptr<Tier> make_tier(std::string_view device, const TierOptions& options);

std::vector<TierTraits> tiers();

}  // namespace zeropg

#include "sharding/offload/registry.h"

#include <c10/util/Exception.h>

#include <string>

#include "sharding/offload/host_tier.h"

namespace zeropg {
namespace {

struct Entry {
  TierTraits traits;
  std::unique_ptr<Tier> (*make)(const TierOptions& options);
};

constexpr Entry kTiers[] = {
    {{.device = "cpu", .is_host_memory = true},
     [](const TierOptions& options) { return make_host_tier(options.is_pinned); }},
    {{.device = "nvme", .has_path = true}, [](const TierOptions& options) { return make_file_tier(options.file); }},
};

}  // namespace

std::unique_ptr<Tier> make_tier(std::string_view device, const TierOptions& options) {
  std::string known;
  for (const Entry& entry : kTiers) {
    if (entry.traits.device == device) return entry.make(options);
    known += ' ';
    known += entry.traits.device;
  }
  TORCH_CHECK_VALUE(false, "[zeropg] offload: no tier is named '", device, "'; the registry has", known);
}

std::vector<TierTraits> tiers() {
  std::vector<TierTraits> all;
  for (const Entry& entry : kTiers) {
    all.push_back(entry.traits);
  }
  return all;
}

}  // namespace zeropg

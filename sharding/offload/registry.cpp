#include "sharding/offload/registry.h"

#include <c10/util/Exception.h>

#include <string>

#include "sharding/offload/host_tier.h"

namespace zeropg {
namespace {

struct Entry {
  std::string_view device;
  std::unique_ptr<Tier> (*make)(const TierOptions& options);
};

constexpr Entry kTiers[] = {
    {"cpu", [](const TierOptions& options) { return make_host_tier(options.is_pinned); }},
    {"nvme", [](const TierOptions& options) { return make_file_tier(options.file); }},
};

}  // namespace

std::unique_ptr<Tier> make_tier(std::string_view device, const TierOptions& options) {
  std::string known;
  for (const Entry& entry : kTiers) {
    if (entry.device == device) return entry.make(options);
    known += ' ';
    known += entry.device;
  }
  TORCH_CHECK_VALUE(false, "[zeropg] offload: no tier is named '", device, "'; the registry has", known);
}

std::vector<std::string_view> tier_devices() {
  std::vector<std::string_view> devices;
  for (const Entry& entry : kTiers) {
    devices.push_back(entry.device);
  }
  return devices;
}

}  // namespace zeropg

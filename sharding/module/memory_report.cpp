#include "sharding/module/memory_report.h"

#include "sharding/parameters/master.h"

namespace zeropg {

std::map<std::string, int64_t> memory_report(const ShardingOptions& options, const Units& units, const Fetch& fetch,
                                             const GradientReducer& reducer) {
  const Fetch::Memory memory = fetch.memory();
  int64_t masters = 0;
  for (const auto& flat : units.flats()) {
    masters += resident_master_bytes(*flat);
  }
  const int64_t residuals = options.residuals == nullptr ? 0 : options.residuals->bytes();
  std::map<std::string, int64_t> report = {{"parameters", memory.parameters},   {"masters", masters},
                                           {"gathered", memory.gathered},       {"gradients", reducer.gradient_bytes()},
                                           {"buckets", reducer.bucket_bytes()}, {"residuals", residuals}};
  if (options.optimizer_offload != nullptr) {
    report["offloaded"] = static_cast<int64_t>(options.optimizer_offload->tier().reserved_bytes());
    report["staging"] = options.optimizer_offload->staging_bytes();
  }
  return report;
}

}  // namespace zeropg

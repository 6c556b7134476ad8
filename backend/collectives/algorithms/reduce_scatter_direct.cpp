// Reduce-scatter of inputs in shared memory: every rank reduces its block from all inputs where they lie, in rank
// order.
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_scatter_direct(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "reduce_scatter_direct";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t offset = spec.rank * spec.bytes;
  std::vector<Region> sources;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) {
    sources.push_back(rank == spec.rank ? input(offset) : peer_input(rank, offset));
  }
  Schedule schedule = make_direct_schedule(kName);
  add_reduce(schedule, output(0), sources, spec.bytes);
  add_barrier(schedule);
  return schedule;
}

Cost cost_reduce_scatter_direct(const CollectiveSpec& spec) {
  return {.barriers = 2, .memory_bytes = (spec.world_size + 1.0) * spec.bytes};
}

}  // namespace zeropg

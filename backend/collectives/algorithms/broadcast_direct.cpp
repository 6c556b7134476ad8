// Broadcast of a tensor in shared memory: everybody copies it from where it lies.
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_broadcast_direct(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "broadcast_direct";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  Schedule schedule = make_direct_schedule(kName);
  if (spec.rank != spec.root) {
    add_long_copy(schedule, output(0), peer_input(spec.root, 0), spec.bytes, spec.bytes >= kStreamingBytes);
  }
  add_barrier(schedule);
  return schedule;
}

Cost cost_broadcast_direct(const CollectiveSpec& spec) { return {.barriers = 2, .memory_bytes = 2.0 * spec.bytes}; }

}  // namespace zeropg

// All-gather of inputs in shared memory: every rank copies all of them from where they lie, each starting at its own.
// Broadcast likewise: everybody copies the root's.
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_all_gather_direct(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_gather_direct";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  Schedule schedule = make_direct_schedule(kName);
  for (int32_t distance = 0; distance < spec.world_size; ++distance) {
    const int32_t peer = (spec.rank + distance) % spec.world_size;
    const Region source = peer == spec.rank ? input(0) : peer_input(peer, 0);
    add_long_copy(schedule, output_block(spec, peer, 0), source, spec.bytes, is_streaming);
  }
  add_barrier(schedule);
  return schedule;
}

Cost cost_all_gather_direct(const CollectiveSpec& spec) {
  return {.barriers = 2, .memory_bytes = 2.0 * spec.world_size * spec.bytes};
}

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

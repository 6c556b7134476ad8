// All-to-all of packed inputs in shared memory: every rank copies its blocks from where they lie, each starting at its
// own.
#include <numeric>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/all_to_all_blocks.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_all_to_all_direct(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_to_all_direct";
  const auto [sources, destinations] = all_to_all_blocks(spec);
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t received = std::accumulate(spec.receive_bytes.begin(), spec.receive_bytes.end(), int64_t{0});
  const bool is_streaming = received >= kStreamingBytes;
  Schedule schedule = make_direct_schedule(kName);
  for (int32_t distance = 0; distance < spec.world_size; ++distance) {
    const int32_t peer = (spec.rank + distance) % spec.world_size;
    const Region source = peer == spec.rank ? sources[peer] : peer_input(peer, 0);
    add_long_copy(schedule, destinations[peer], source, spec.receive_bytes[peer], is_streaming);
  }
  add_barrier(schedule);
  return schedule;
}

Cost cost_all_to_all_direct(const CollectiveSpec& spec) {
  const double received = std::accumulate(spec.receive_bytes.begin(), spec.receive_bytes.end(), 0.0);
  return {.barriers = 2, .memory_bytes = 2 * received};
}

}  // namespace zeropg

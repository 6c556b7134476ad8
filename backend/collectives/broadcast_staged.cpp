// Broadcast: the root stages its tensor, the others copy it out. One barrier per chunk.
#include <algorithm>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_broadcast_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "broadcast_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t chunk_bytes = cut_chunk(spec, 1).bytes;
  const int64_t chunks = part_count(spec.bytes, chunk_bytes);
  Schedule schedule = make_schedule(kName, chunks);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [offset, bytes] = part_of(spec.bytes, chunk_bytes, chunk);
    const Region place = staging(spec.root, chunk, 0);
    if (spec.rank == spec.root) add_copy(schedule, place, input(offset), bytes);
    add_barrier(schedule);
    if (spec.rank != spec.root) add_copy(schedule, output(offset), place, bytes);
  }
  return schedule;
}

Cost cost_broadcast_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks, .memory_bytes = 2.0 * spec.bytes};
}

}  // namespace zeropg

// All-gather: every rank stages its block and copies the blocks of the others out. One barrier per chunk.
#include <algorithm>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_all_gather_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_gather_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t chunk_bytes = cut_chunk(spec, 1).bytes;
  const int64_t chunks = part_count(spec.bytes, chunk_bytes);
  Schedule schedule = make_schedule(kName, chunks);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [offset, bytes] = part_of(spec.bytes, chunk_bytes, chunk);
    add_copy(schedule, staging(spec.rank, chunk, 0), input(offset), bytes);
    add_barrier(schedule);
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      const Region source = rank == spec.rank ? input(offset) : staging(rank, chunk, 0);
      add_copy(schedule, output_block(spec, rank, offset), source, bytes);
    }
  }
  return schedule;
}

Cost cost_all_gather_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks, .memory_bytes = 2.0 * (spec.world_size + 1) * spec.bytes};
}

}  // namespace zeropg

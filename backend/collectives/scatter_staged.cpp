// Scatter: the root stages a piece of each rank's block, the others copy theirs out. One barrier per chunk.
#include <algorithm>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_scatter_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "scatter_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t piece_bytes = cut_chunk(spec, spec.world_size - 1).bytes;
  const int64_t chunks = part_count(spec.bytes, piece_bytes);
  Schedule schedule = make_schedule(kName, chunks);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [offset, bytes] = part_of(spec.bytes, piece_bytes, chunk);
    const auto place = [&](int32_t rank) {
      return staging(spec.root, chunk, piece_for_peer(spec.root, rank) * piece_bytes);
    };
    if (spec.rank == spec.root) {
      for (int32_t rank = 0; rank < spec.world_size; ++rank) {
        if (rank != spec.root) add_copy(schedule, place(rank), input_block(spec, rank, offset), bytes);
      }
    }
    add_barrier(schedule);
    const Region source = spec.rank == spec.root ? input_block(spec, spec.root, offset) : place(spec.rank);
    add_copy(schedule, output(offset), source, bytes);
  }
  return schedule;
}

Cost cost_scatter_staged(const CollectiveSpec& spec) {
  const int32_t pieces = std::max(1, spec.world_size - 1);
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, pieces).bytes));
  return {.barriers = chunks, .memory_bytes = 2.0 * spec.world_size * spec.bytes};
}

}  // namespace zeropg

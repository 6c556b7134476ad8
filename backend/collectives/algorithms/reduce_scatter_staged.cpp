// Reduce-scatter: every rank stages a piece of each block that others own and reduces its own block from all ranks in
// rank order, its own contribution straight from the input. One barrier per chunk.
#include <algorithm>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_scatter_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "reduce_scatter_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t piece_bytes = cut_chunk(spec, spec.world_size - 1).bytes;
  const auto stage = [&](Schedule& schedule, int64_t chunk, Range range) {
    for (int32_t owner = 0; owner < spec.world_size; ++owner) {
      if (owner == spec.rank) continue;
      const int64_t place = piece_for_peer(spec.rank, owner) * piece_bytes;
      add_copy(schedule, staging(spec.rank, chunk, place), input_block(spec, owner, range.offset_bytes), range.bytes);
    }
  };
  std::vector<Region> sources(spec.world_size);
  const auto take = [&](Schedule& schedule, int64_t chunk, Range range) {
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      sources[rank] = rank == spec.rank ? input_block(spec, rank, range.offset_bytes)
                                        : staging(rank, chunk, piece_for_peer(rank, spec.rank) * piece_bytes);
    }
    add_reduce(schedule, output(range.offset_bytes), sources, range.bytes);
  };
  return plan_staged_once(kName, spec, piece_bytes, stage, take);
}

Cost cost_reduce_scatter_staged(const CollectiveSpec& spec) {
  const int32_t pieces = std::max(1, spec.world_size - 1);
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, pieces).bytes));
  return {.barriers = chunks,
          .memory_bytes = (3.0 * spec.world_size - 1) * spec.bytes,
          .far_bytes = static_cast<double>(far_ranks(spec)) * spec.bytes};
}

}  // namespace zeropg

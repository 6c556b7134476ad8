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
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    for (int32_t owner = 0; owner < spec.world_size; ++owner) {
      if (owner == spec.rank) continue;
      const int64_t place = piece_for_peer(spec.rank, owner) * piece_bytes;
      add_copy(stage, staging(spec.rank, 0, place), with_stride(input_block(spec, owner, 0), chunks.bytes), chunks);
    }
  };
  std::vector<Region> sources(spec.world_size);
  const auto reduce = [&](PipelineStage stage, const Chunks& chunks) {
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      sources[rank] = rank == spec.rank ? with_stride(input_block(spec, rank, 0), chunks.bytes)
                                        : staging(rank, 0, piece_for_peer(rank, spec.rank) * piece_bytes);
    }
    add_reduce(stage, with_stride(output(0), chunks.bytes), sources, chunks);
  };
  return plan_staged_once(kName, spec, piece_bytes, copy_in, reduce);
}

Cost cost_reduce_scatter_staged(const CollectiveSpec& spec) {
  const int32_t pieces = std::max(1, spec.world_size - 1);
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, pieces).bytes));
  return {.barriers = chunks,
          .memory_bytes = (3.0 * spec.world_size - 1) * spec.bytes,
          .far_bytes = static_cast<double>(far_ranks(spec)) * spec.bytes};
}

}  // namespace zeropg

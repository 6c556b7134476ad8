// All-gather: every rank stages its block and copies the blocks of the others out. One barrier per chunk.
#include <algorithm>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_all_gather_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_gather_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    add_copy(stage, staging(spec.rank, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  };
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  const auto copy_out = [&](PipelineStage stage, const Chunks& chunks) {
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      const Region source = rank == spec.rank ? with_stride(input(0), chunks.bytes) : staging(rank, 0, 0);
      add_long_copy(stage, with_stride(output_block(spec, rank, 0), chunks.bytes), source, chunks, is_streaming);
    }
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, copy_in, copy_out);
}

Cost cost_all_gather_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks,
          .memory_bytes = 2.0 * (spec.world_size + 1) * spec.bytes,
          .far_bytes = static_cast<double>(far_ranks(spec)) * spec.bytes};
}

}  // namespace zeropg

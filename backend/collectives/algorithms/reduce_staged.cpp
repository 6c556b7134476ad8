// Reduce: all ranks but the root stage their inputs, the root reduces them in rank order. One barrier per chunk.
#include <algorithm>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "reduce_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank == spec.root) return;
    add_copy(stage, staging(spec.rank, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  };
  const auto reduce = [&](PipelineStage stage, const Chunks& chunks) {
    if (spec.rank != spec.root) return;
    add_reduce(stage, with_stride(output(0), chunks.bytes), contributions(spec, chunks.bytes), chunks);
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, copy_in, reduce);
}

Cost cost_reduce_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks, .memory_bytes = (spec.world_size + 1.0) * spec.bytes};
}

}  // namespace zeropg

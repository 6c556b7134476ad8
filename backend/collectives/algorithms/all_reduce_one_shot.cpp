// All-reduce with one barrier per chunk: stage the input, meet, reduce the inputs of all ranks into the own output.
//
// Every rank reads all inputs, so (world_size + 3) * bytes move per rank. Right for small tensors, where a barrier
// costs more than the bytes. All ranks reduce in rank order and thus get the same bits.
#include <algorithm>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_all_reduce_one_shot(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_reduce_one_shot";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto copy_in = [&](PipelineStage stage, const Chunks& chunks) {
    add_copy(stage, staging(spec.rank, 0, 0), with_stride(input(0), chunks.bytes), chunks);
  };
  const auto reduce = [&](PipelineStage stage, const Chunks& chunks) {
    add_reduce(stage, with_stride(output(0), chunks.bytes), contributions(spec, chunks.bytes), chunks);
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, copy_in, reduce);
}

Cost cost_all_reduce_one_shot(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks,
          .memory_bytes = (spec.world_size + 3.0) * spec.bytes,
          .far_bytes = static_cast<double>(far_ranks(spec)) * spec.bytes};
}

}  // namespace zeropg

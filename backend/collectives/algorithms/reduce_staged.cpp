// Reduce: all ranks but the root stage their inputs, the root reduces them in rank order. One barrier per chunk.
#include <algorithm>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "reduce_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto stage = [&](Schedule& schedule, int64_t chunk, Range range) {
    if (spec.rank == spec.root) return;
    add_copy(schedule, staging(spec.rank, chunk, 0), input(range.offset_bytes), range.bytes);
  };
  const auto take = [&](Schedule& schedule, int64_t chunk, Range range) {
    if (spec.rank != spec.root) return;
    add_reduce(schedule, output(range.offset_bytes), contributions(spec, chunk, range.offset_bytes), range.bytes);
  };
  return plan_staged_once(kName, spec, cut_chunk(spec, 1).bytes, stage, take);
}

Cost cost_reduce_staged(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks, .memory_bytes = (spec.world_size + 1.0) * spec.bytes};
}

}  // namespace zeropg

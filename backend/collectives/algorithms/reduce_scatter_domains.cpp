// Reduce-scatter over the domains of one node: each domain reduces its share of all blocks, and the blocks' owners add
// the partial sums of all domains, in domain order. Every domain's sums cross to each other domain once.
//
// Note [Pipeline between domains] in all_reduce_domains.cpp, without its last two stages.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/domain_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_scatter_domains(const CollectiveSpec& spec) {
  const DomainPieces pieces = cut_blocks_over_domains(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const SlotLayout slots(layout);
  const NodeLayout in_domain{placement, layout, slots};
  const DomainPhases between(spec, placement, layout);
  Schedule schedule = make_schedule("reduce_scatter_domains", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const std::vector<Extent> inputs = extents_of_blocks(spec, placement, layout, pieces.chunks, input_block);
  const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
  add_barrier({schedule, 1, pieces.chunks.count + 1});
  const auto partial = [&](int32_t part, int64_t place) { return between.partial(part, place); };
  reduce_in_node(stage(1), inputs, in_domain, partial, ReduceScope::kOfRanksOfDomain);
  between.complete(stage(2), inputs,
                   [&](int64_t place) { return with_stride(output(place - first_place), pieces.chunks.bytes); });
  stage_inputs(stage(0), inputs, in_domain);
  return schedule;
}

// Copy in what others of the domain reduce, reduce a share of all blocks, and add the domains' sums of the own one.
Cost cost_reduce_scatter_domains(const CollectiveSpec& spec) {
  const double chunks = cut_blocks_over_domains(spec).chunks.count;
  const double total_bytes = static_cast<double>(spec.world_size) * spec.bytes;
  const double domains = spec.domains.size();
  const double widening = accumulator_widening(spec);
  return {.barriers = chunks + 1,
          .memory_bytes =
              (3 + (widening - 2) / smallest_domain_size(spec)) * total_bytes + (widening * domains + 1) * spec.bytes,
          .far_bytes = widening * (domains - 1) * spec.bytes};
}

}  // namespace zeropg

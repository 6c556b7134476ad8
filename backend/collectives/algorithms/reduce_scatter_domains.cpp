// Reduce-scatter over the domains of one node: each domain reduces its share of all blocks, and the blocks' owners add
// the partial sums of all domains, in domain order. Every domain's sums cross to each other domain once.
//
// Note [Pipeline between domains] in all_reduce_domains.cpp, without its last two stages.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/domain_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_reduce_scatter_domains(const CollectiveSpec& spec) {
  const DomainPieces pieces = cut_blocks_over_domains(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const DomainPhases between(spec, placement, layout);
  Schedule schedule = make_schedule("reduce_scatter_domains", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto is_chunk = [&](int64_t chunk) { return chunk >= 0 && chunk < pieces.chunks.count; };
  const auto inputs = [&](int64_t chunk) {
    const Range piece = part_of(spec.bytes, pieces.chunks.bytes, chunk);
    return extents_of_blocks(spec, placement, layout, piece, input_block);
  };
  stage_inputs(schedule, 0, inputs(0), layout, placement);
  for (int64_t slot = 0; slot <= pieces.chunks.count; ++slot) {
    add_barrier(schedule);
    if (is_chunk(slot)) {
      const auto partial = [&](int32_t part, int64_t place) { return between.partial(slot, part, place); };
      reduce_in_node(schedule, slot, inputs(slot), layout, placement, partial, ReduceScope::kOfRanksOfDomain);
    }
    if (is_chunk(slot - 1)) {
      const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
      between.complete(schedule, slot - 1, inputs(slot - 1),
                       [&](int64_t place) { return output((slot - 1) * pieces.chunks.bytes + place - first_place); });
    }
    if (is_chunk(slot + 1)) stage_inputs(schedule, slot + 1, inputs(slot + 1), layout, placement);
  }
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

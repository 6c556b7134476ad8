// All-reduce over the domains of one node: reduce-scatter in each domain, every rank completes its piece, each domain
// fetches what others completed, all-gather in each domain. 2 (D - 1) times the bytes cross between D domains, half of
// them as partial sums. Where each of n ranks reads from all others, that is 2 (n - n / D) times the bytes.
//
// Note [Pipeline between domains]
// Several chunks are under way. In slot t, that is between two barriers, a rank
//   reduces chunk t in its domain,
//   completes its piece of chunk t - 1,
//   fetches its slices of chunk t - 2,
//   copies chunk t - 3 out and chunk t + 1 in.
// In one bank chunk t goes from the slots' chunk, without the own slices, to the partial sums, and chunk t - 2 from the
// completed pieces to the own slices. In the other one chunk t + 1 comes to the slots' chunk without the own slices,
// chunk t - 1 goes from the partial sums to the completed pieces, and chunk t - 3 leaves the own slices. So no place is
// written while others still read it.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/phases/domain_phases.h"
#include "backend/collectives/phases/node_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kLag = 3;  // slots from a chunk's reduction to its copying out

}  // namespace

Schedule plan_all_reduce_domains(const CollectiveSpec& spec) {
  const DomainPieces pieces = cut_over_domains(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const SlotLayout slots(layout);
  const NodeLayout in_domain{placement, layout, slots};
  const DomainPhases between(spec, placement, layout);
  Schedule schedule = make_schedule("all_reduce_domains", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto stage = [&](int32_t lag) { return PipelineStage(schedule, lag, pieces.chunks.count); };
  const Chunks chunks = chunks_of_size(spec.bytes, spec.world_size * pieces.chunks.bytes);
  const std::vector<Extent> inputs = extents_of_range(input(0), chunks);
  const std::vector<Extent> outputs = extents_of_range(output(0), chunks);
  add_barrier({schedule, 1, chunks.count + kLag});
  const auto partial = [&](int32_t part, int64_t place) { return between.partial(part, place); };
  reduce_in_node(stage(1), inputs, in_domain, partial, ReduceScope::kOfRanksOfDomain);
  between.complete(stage(2), inputs, [&](int64_t place) { return between.completed(place); });
  between.fetch(stage(3), outputs);
  copy_out(stage(1 + kLag), outputs, in_domain);
  stage_inputs(stage(0), inputs, in_domain);
  return schedule;
}

// Through staging as in a flat one; then a rank's slices, 1 / g of the tensor, are written and read as partial sums,
// and copied once more.
Cost cost_all_reduce_domains(const CollectiveSpec& spec) {
  const double chunks = cut_over_domains(spec).chunks.count;
  const double slices = 1.0 / smallest_domain_size(spec);
  const double piece = 1.0 / spec.world_size;
  const double domains = spec.domains.size();
  const double widening = accumulator_widening(spec);
  return {.barriers = chunks == 0 ? 1 : chunks + kLag,
          .memory_bytes = (5 + widening * slices + (widening * domains + 1) * piece) * spec.bytes,
          .far_bytes = (widening * (domains - 1) * piece + slices * far_ranks(spec) * piece) * spec.bytes};
}

}  // namespace zeropg

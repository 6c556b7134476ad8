// Broadcast over the domains of one node: the root stages its tensor, which its domain copies out; each other domain
// fetches it once, shared by its ranks, and copies out of its own slots one barrier later.
//
// On banks: between two barriers the root stages chunk t + 1 while others still copy chunk t - 1 out of the same bank,
// but of the slots of other domains, where no root is.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/domain_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

namespace {

Chunks chunks_of(const CollectiveSpec& spec) {
  const Pieces piece = cut_chunk(spec, 1);
  return equal_chunks(spec.bytes, piece.bytes, piece.alignment);
}

}  // namespace

Schedule plan_broadcast_domains(const CollectiveSpec& spec) {
  const Chunks chunks = chunks_of(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_one_part(placement, chunks.bytes, cut_chunk(spec, 1).alignment);
  Schedule schedule = make_schedule("broadcast_domains", chunks.count);
  if (chunks.count == 0) return schedule;
  const bool is_near_root = placement.node() == placement.node_of(spec.root);
  const auto is_chunk = [&](int64_t chunk) { return chunk >= 0 && chunk < chunks.count; };
  const auto range_of = [&](int64_t chunk) { return part_of(spec.bytes, chunks.bytes, chunk); };
  const auto outputs = [&](int64_t chunk) {
    return extents_of_range(output(range_of(chunk).offset_bytes), range_of(chunk).bytes);
  };
  const auto stage = [&](int64_t chunk) {
    add_copy(schedule, staging(spec.root, chunk, 0), input(range_of(chunk).offset_bytes), range_of(chunk).bytes);
  };
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  if (spec.rank == spec.root) stage(0);
  for (int64_t slot = 0; slot <= chunks.count; ++slot) {
    add_barrier(schedule);
    if (spec.rank == spec.root) {
      if (is_chunk(slot + 1)) stage(slot + 1);
    } else if (is_near_root) {
      if (!is_chunk(slot)) continue;
      add_long_copy(schedule, output(range_of(slot).offset_bytes), staging(spec.root, slot, 0), range_of(slot).bytes,
                    is_streaming);
    } else {
      if (is_chunk(slot)) {
        for (const Extent& extent : cut(outputs(slot), layout.own_slice(0))) {
          const auto [place, bytes] = extent.places;
          add_copy(schedule, staging(spec.rank, slot, place), staging(spec.root, slot, place), bytes);
        }
      }
      if (is_chunk(slot - 1)) copy_out(schedule, slot - 1, outputs(slot - 1), layout, placement, is_streaming);
    }
  }
  return schedule;
}

// Fetch a share, copy all out.
Cost cost_broadcast_domains(const CollectiveSpec& spec) {
  const double share = 1.0 / smallest_domain_size(spec) * spec.bytes;
  return {.barriers = chunks_of(spec).count + 1.0, .memory_bytes = 2.0 * spec.bytes + 2 * share, .far_bytes = share};
}

}  // namespace zeropg

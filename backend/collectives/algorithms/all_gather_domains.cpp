// All-gather over the domains of one node: every rank stages its block, each domain fetches the blocks of the others
// once, shared by its ranks, and all copy out of their own domain's slots.
//
// Note [Pipeline between domains] in all_reduce_domains.cpp, with its last two stages: blocks are staged where
// completed pieces would be.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/domain_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/platform/cpu/copy.h"

namespace zeropg {

Schedule plan_all_gather_domains(const CollectiveSpec& spec) {
  const DomainPieces pieces = cut_blocks_over_domains(spec);
  const Placement placement = Placement::over_domains(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const DomainPhases between(spec, placement, layout);
  Schedule schedule = make_schedule("all_gather_domains", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto is_chunk = [&](int64_t chunk) { return chunk >= 0 && chunk < pieces.chunks.count; };
  const auto piece_of = [&](int64_t chunk) { return part_of(spec.bytes, pieces.chunks.bytes, chunk); };
  const auto outputs = [&](int64_t chunk) {
    return extents_of_blocks(spec, placement, layout, piece_of(chunk), output_block);
  };
  const auto stage_block = [&](int64_t chunk) {
    const int64_t place = layout.own_slice(placement.node()).offset_bytes;
    add_copy(schedule, between.completed(chunk, place), input(piece_of(chunk).offset_bytes), piece_of(chunk).bytes);
  };
  const bool is_streaming = spec.world_size * spec.bytes >= kStreamingBytes;
  stage_block(0);
  for (int64_t slot = 0; slot <= pieces.chunks.count; ++slot) {
    add_barrier(schedule);
    if (is_chunk(slot)) between.fetch(schedule, slot, outputs(slot));
    if (is_chunk(slot - 1)) copy_out(schedule, slot - 1, outputs(slot - 1), layout, placement, is_streaming);
    if (is_chunk(slot + 1)) stage_block(slot + 1);
  }
  return schedule;
}

// Copy in, fetch a share of all blocks, copy all out.
Cost cost_all_gather_domains(const CollectiveSpec& spec) {
  const double chunks = cut_blocks_over_domains(spec).chunks.count;
  const double domain_size = smallest_domain_size(spec);
  const double bytes = spec.bytes;
  return {.barriers = chunks + 1,
          .memory_bytes = 2 * (spec.world_size * (1 + 1 / domain_size) + 1) * bytes,
          .far_bytes = far_ranks(spec) / domain_size * bytes};
}

}  // namespace zeropg

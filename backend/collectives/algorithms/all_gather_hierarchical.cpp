// All-gather over several nodes: a rank sends its block to each other node once, divided among the ranks there, which
// stage what they receive for all of their node.
//
// With a codec all ranks get what the nodes that receive a block decode, also those of the node that it comes from.
//
// In slot t of the pipeline a rank sends its piece of chunk t, copies chunk t - 2 out, and stages its own piece and
// what it receives of chunk t - 1. See Note [Pipeline between nodes] in all_reduce_hierarchical.cpp.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/internode_phases.h"
#include "backend/collectives/schedule/node_phases.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kMessagesUnderWay = 2;  // of a pair: pieces of two chunks

}  // namespace

bool supports_all_gather_hierarchical(const CollectiveSpec& spec) {
  return !is_one_node(spec) && can_exchange(spec, spec.world_size, kMessagesUnderWay);
}

Schedule plan_all_gather_hierarchical(const CollectiveSpec& spec) {
  const BlockPieces pieces = cut_blocks(spec, kMessagesUnderWay);
  const Placement placement(spec);
  const ChunkLayout layout = ChunkLayout::of_blocks(placement, pieces.chunks.bytes, pieces.alignment);
  const InternodePhases between(spec, placement, layout);
  Schedule schedule = make_schedule("all_gather_hierarchical", pieces.chunks.count);
  if (pieces.chunks.count == 0) return schedule;
  const auto is_chunk = [&](int64_t chunk) { return chunk >= 0 && chunk < pieces.chunks.count; };
  const auto piece_of = [&](int64_t chunk) { return part_of(spec.bytes, pieces.chunks.bytes, chunk); };
  const auto outputs = [&](int64_t chunk) {
    return extents_of_blocks(spec, placement, layout, piece_of(chunk), output_block);
  };
  const int64_t first_place = layout.own_slice(placement.node()).offset_bytes;
  const bool is_encoded = spec.codec != nullptr;
  if (is_encoded) schedule.scratch_bytes = between.scratch_bytes();
  const auto own_piece = [&](int64_t chunk, int64_t place) {
    return is_encoded ? between.completed(chunk, place) : input(piece_of(chunk).offset_bytes + place - first_place);
  };
  add_barrier(schedule);
  for (int64_t slot = 0; slot < pieces.chunks.count + 2; ++slot) {
    if (is_chunk(slot - 2)) add_barrier(schedule);
    if (is_chunk(slot)) {
      const auto [offset, bytes] = piece_of(slot);
      if (is_encoded) add_copy(schedule, own_piece(slot, first_place), input(offset), bytes);
      between.send_completed(schedule, placement.other_nodes(), outputs(slot),
                             [&](int64_t place) { return own_piece(slot, place); });
    }
    if (is_chunk(slot - 2)) copy_out(schedule, slot - 2, outputs(slot - 2), layout, placement);
    if (is_chunk(slot - 1)) {
      const auto staged = [&](int64_t place) { return staging(spec.rank, slot - 1, place); };
      add_copy(schedule, staged(first_place), own_piece(slot - 1, first_place), piece_of(slot - 1).bytes);
      between.receive_completed(schedule, outputs(slot - 1), staged);
    }
  }
  return schedule;
}

Cost cost_all_gather_hierarchical(const CollectiveSpec& spec) {
  return {.barriers = 1.0 + cut_blocks(spec, kMessagesUnderWay).chunks.count,
          .memory_bytes = 2.0 * (spec.world_size + 1) * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : 1.0,
          .network_bytes = static_cast<double>(blocks_over_busiest_link(spec)) * spec.bytes};
}

}  // namespace zeropg

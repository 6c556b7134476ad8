// All-reduce in chunks: every rank stages the shares that others reduce, reduces its own share of the chunk from all
// ranks in rank order, and copies all reduced shares out. (5 - 1/world_size) * bytes move per rank, whatever the world.
//
// Note [Pipelined staging]
// Copy-in, reduce and copy-out of one chunk are separated by barriers, but three chunks are worked on between two
// barriers, so a chunk costs one barrier and not two: between barriers k and k + 1 a rank reduces chunk k (bank k % 2),
// copies chunk k - 1 out and chunk k + 1 in (both in the other bank). The last two do not collide, because a rank's own
// share of its slot is never copied in: it is reduced straight from the input, and its place holds the result only. For
// that, a share has the same place in every chunk, also in a shorter last one.
#include <algorithm>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

struct Plan {
  const CollectiveSpec& spec;
  Pieces share;
  Schedule schedule;

  // Where share `owner` of a chunk lies in the tensor.
  Range share_of(int64_t chunk, int32_t owner) const {
    const Range whole = part_of(spec.bytes, share.bytes * spec.world_size, chunk);
    const Range part = equal_part_of(whole.bytes, spec.world_size, share.alignment, owner);
    return {whole.offset_bytes + part.offset_bytes, part.bytes};
  }

  Region staged(int32_t slot, int64_t chunk, int32_t owner) const { return staging(slot, chunk, owner * share.bytes); }

  void copy_in(int64_t chunk) {
    for (int32_t owner = 0; owner < spec.world_size; ++owner) {
      if (owner == spec.rank) continue;
      const auto [offset, bytes] = share_of(chunk, owner);
      add_copy(schedule, staged(spec.rank, chunk, owner), input(offset), bytes);
    }
  }

  void reduce(int64_t chunk) {
    const auto [offset, bytes] = share_of(chunk, spec.rank);
    std::vector<Region> sources(spec.world_size);
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      sources[rank] = rank == spec.rank ? input(offset) : staged(rank, chunk, spec.rank);
    }
    add_reduce(schedule, staged(spec.rank, chunk, spec.rank), sources, bytes);
  }

  void copy_out(int64_t chunk) {
    for (int32_t owner = 0; owner < spec.world_size; ++owner) {
      const auto [offset, bytes] = share_of(chunk, owner);
      add_copy(schedule, output(offset), staged(owner, chunk, owner), bytes);
    }
  }
};

}  // namespace

Schedule plan_all_reduce_staged(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_reduce_staged";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Pieces share = cut_chunk(spec, spec.world_size);
  const int64_t chunks = part_count(spec.bytes, share.bytes * spec.world_size);
  Plan plan{spec, share, make_schedule(kName, chunks)};
  if (chunks == 0) return std::move(plan.schedule);
  plan.copy_in(0);
  add_barrier(plan.schedule);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    plan.reduce(chunk);
    if (chunk > 0) plan.copy_out(chunk - 1);
    if (chunk + 1 < chunks) plan.copy_in(chunk + 1);
    add_barrier(plan.schedule);
  }
  plan.copy_out(chunks - 1);
  return std::move(plan.schedule);
}

Cost cost_all_reduce_staged(const CollectiveSpec& spec) {
  const double chunks = part_count(spec.bytes, cut_chunk(spec, spec.world_size).bytes * spec.world_size);
  return {.barriers = chunks + 1,
          .memory_bytes = (5 - 1.0 / spec.world_size) * spec.bytes,
          .far_bytes = 2.0 * far_ranks(spec) / spec.world_size * spec.bytes};
}

}  // namespace zeropg

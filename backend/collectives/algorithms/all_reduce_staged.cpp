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

// Of nearly equal size, so that also the last one keeps all ranks busy.
Chunks chunks_of(const CollectiveSpec& spec) {
  const Pieces share = cut_chunk(spec, spec.world_size);
  return equal_chunks(spec.bytes, share.bytes * spec.world_size, share.alignment * spec.world_size);
}

class Plan {
 public:
  explicit Plan(const CollectiveSpec& spec)
      : spec_(spec), chunks_(chunks_of(spec)), share_bytes_(chunks_.bytes / spec.world_size) {}

  Schedule run() {
    Schedule schedule = make_schedule("all_reduce_staged", chunks_.count);
    if (chunks_.count == 0) return schedule;
    add_barrier({schedule, 1, chunks_.count + 1});
    reduce({schedule, 1, chunks_.count});
    copy_out({schedule, 2, chunks_.count});
    copy_in({schedule, 0, chunks_.count});
    return schedule;
  }

 private:
  Region staged(int32_t slot, int32_t owner) const { return staging(slot, 0, owner * share_bytes_); }
  Region of_share(Region tensor, int32_t owner) const {
    return with_stride(advance(tensor, owner * share_bytes_), chunks_.bytes);
  }
  StepBytes bytes_of_share(int32_t owner) const {
    return {share_bytes_, part_of(chunks_.last_bytes, share_bytes_, owner).bytes};
  }

  void copy_in(PipelineStage stage) const {
    for (int32_t owner = 0; owner < spec_.world_size; ++owner) {
      if (owner == spec_.rank) continue;
      add_copy(stage, staged(spec_.rank, owner), of_share(input(0), owner), bytes_of_share(owner));
    }
  }

  void reduce(PipelineStage stage) const {
    std::vector<Region> sources(spec_.world_size);
    for (int32_t rank = 0; rank < spec_.world_size; ++rank) {
      sources[rank] = rank == spec_.rank ? of_share(input(0), rank) : staged(rank, spec_.rank);
    }
    add_reduce(stage, staged(spec_.rank, spec_.rank), sources, bytes_of_share(spec_.rank));
  }

  void copy_out(PipelineStage stage) const {
    for (int32_t owner = 0; owner < spec_.world_size; ++owner) {
      add_copy(stage, of_share(output(0), owner), staged(owner, owner), bytes_of_share(owner));
    }
  }

  const CollectiveSpec& spec_;
  const Chunks chunks_;
  const int64_t share_bytes_;
};

}  // namespace

Schedule plan_all_reduce_staged(const CollectiveSpec& spec) {
  if (spec.world_size == 1) return plan_alone("all_reduce_staged", spec);
  return Plan(spec).run();
}

Cost cost_all_reduce_staged(const CollectiveSpec& spec) {
  const double chunks = chunks_of(spec).count;
  return {.barriers = chunks + 1,
          .memory_bytes = (5 - 1.0 / spec.world_size) * spec.bytes,
          .far_bytes = 2.0 * far_ranks(spec) / spec.world_size * spec.bytes};
}

}  // namespace zeropg

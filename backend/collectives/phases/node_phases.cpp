#include "backend/collectives/phases/node_phases.h"

namespace zeropg {

void add_barriers(PipelineStage reduction, int32_t distance) {
  if (reduction.chunks < distance) {
    add_barrier(reduction);
    add_barrier({reduction.schedule, reduction.lag + distance, reduction.chunks});
  } else {
    add_barrier({reduction.schedule, reduction.lag, reduction.chunks + distance});
  }
}

void stage_inputs(PipelineStage stage, const std::vector<Extent>& inputs, const NodeLayout& layout, int32_t group) {
  const int32_t own = layout.placement.local_ranks()[layout.placement.local_rank()];
  for (const int32_t part : layout.slot.parts(group)) {
    const Range whole = layout.chunk.part(part);
    const Range kept = layout.chunk.own_slice(part);
    const int64_t before = kept.offset_bytes - whole.offset_bytes;
    const Range others[] = {{whole.offset_bytes, before},
                            {kept.offset_bytes + kept.bytes, whole.bytes - before - kept.bytes}};
    for (const Range& places : others) {
      for (const Extent& extent : cut(inputs, places)) {
        add_copy(stage, layout.slot.staged(own, part, extent.places.offset_bytes), extent.tensor, extent.bytes());
      }
    }
  }
}

void reduce_in_node(PipelineStage stage, const std::vector<Extent>& inputs, const NodeLayout& layout,
                    const PartialOfPlace& partial, ReduceScope scope, int32_t group) {
  const std::vector<int32_t>& ranks = layout.placement.local_ranks();
  std::vector<Region> sources(ranks.size());
  for (const int32_t part : layout.slot.parts(group)) {
    for (const Extent& extent : cut(inputs, layout.chunk.own_slice(part))) {
      const int64_t place = extent.places.offset_bytes;
      for (size_t i = 0; i < ranks.size(); ++i) {
        const bool is_own = static_cast<int32_t>(i) == layout.placement.local_rank();
        sources[i] = is_own ? extent.tensor : layout.slot.staged(ranks[i], part, place);
      }
      add_reduce(stage, partial(part, place), sources, extent.bytes(), scope);
    }
  }
}

void copy_out(PipelineStage stage, const std::vector<Extent>& outputs, const NodeLayout& layout, bool is_streaming,
              int32_t group) {
  const int32_t node = layout.placement.node();
  for (const int32_t part : layout.slot.parts(group)) {
    for (int32_t local_rank = 0; local_rank < layout.placement.node_size(node); ++local_rank) {
      const int32_t rank = layout.placement.local_ranks()[local_rank];
      for (const Extent& extent : cut(outputs, layout.chunk.slice(part, node, local_rank))) {
        add_long_copy(stage, extent.tensor, layout.slot.staged(rank, part, extent.places.offset_bytes), extent.bytes(),
                      is_streaming);
      }
    }
  }
}

}  // namespace zeropg

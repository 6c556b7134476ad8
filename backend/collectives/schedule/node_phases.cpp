#include "backend/collectives/schedule/node_phases.h"

namespace zeropg {

void stage_inputs(PipelineStage stage, const std::vector<Extent>& inputs, const ChunkLayout& layout,
                  const Placement& placement) {
  const int32_t own = placement.local_ranks()[placement.local_rank()];
  for (int32_t part = 0; part < layout.part_count(); ++part) {
    const Range whole = layout.part(part);
    const Range kept = layout.own_slice(part);
    const int64_t before = kept.offset_bytes - whole.offset_bytes;
    const Range others[] = {{whole.offset_bytes, before},
                            {kept.offset_bytes + kept.bytes, whole.bytes - before - kept.bytes}};
    for (const Range& places : others) {
      for (const Extent& extent : cut(inputs, places)) {
        add_copy(stage, staging(own, 0, extent.places.offset_bytes), extent.tensor, extent.bytes());
      }
    }
  }
}

void reduce_in_node(PipelineStage stage, const std::vector<Extent>& inputs, const ChunkLayout& layout,
                    const Placement& placement, const PartialOfPlace& partial, ReduceScope scope) {
  const std::vector<int32_t>& ranks = placement.local_ranks();
  std::vector<Region> sources(ranks.size());
  for (int32_t part = 0; part < layout.part_count(); ++part) {
    for (const Extent& extent : cut(inputs, layout.own_slice(part))) {
      const int64_t place = extent.places.offset_bytes;
      for (size_t i = 0; i < ranks.size(); ++i) {
        const bool is_own = static_cast<int32_t>(i) == placement.local_rank();
        sources[i] = is_own ? extent.tensor : staging(ranks[i], 0, place);
      }
      add_reduce(stage, partial(part, place), sources, extent.bytes(), scope);
    }
  }
}

void copy_out(PipelineStage stage, const std::vector<Extent>& outputs, const ChunkLayout& layout,
              const Placement& placement, bool is_streaming) {
  for (int32_t part = 0; part < layout.part_count(); ++part) {
    for (int32_t local_rank = 0; local_rank < placement.node_size(placement.node()); ++local_rank) {
      const int32_t rank = placement.local_ranks()[local_rank];
      for (const Extent& extent : cut(outputs, layout.slice(part, placement.node(), local_rank))) {
        add_long_copy(stage, extent.tensor, staging(rank, 0, extent.places.offset_bytes), extent.bytes(), is_streaming);
      }
    }
  }
}

}  // namespace zeropg

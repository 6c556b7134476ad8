// All-reduce with one barrier per chunk: stage the input, meet, reduce the inputs of all ranks into the own output.
//
// Every rank reads all inputs, so (world_size + 3) * bytes move per rank. Right for small tensors, where a barrier
// costs more than the bytes. All ranks reduce in rank order and thus get the same bits.
#include <algorithm>
#include <vector>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_all_reduce_one_shot(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_reduce_one_shot";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const int64_t chunk_bytes = cut_chunk(spec, 1).bytes;
  const int64_t chunks = part_count(spec.bytes, chunk_bytes);
  Schedule schedule = make_schedule(kName, chunks);
  std::vector<Region> sources(spec.world_size);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto [offset, bytes] = part_of(spec.bytes, chunk_bytes, chunk);
    add_copy(schedule, staging(spec.rank, chunk, 0), input(offset), bytes);
    add_barrier(schedule);
    for (int32_t rank = 0; rank < spec.world_size; ++rank) {
      sources[rank] = rank == spec.rank ? input(offset) : staging(rank, chunk, 0);
    }
    add_reduce(schedule, output(offset), sources, bytes);
  }
  return schedule;
}

Cost cost_all_reduce_one_shot(const CollectiveSpec& spec) {
  const double chunks = std::max<double>(1, part_count(spec.bytes, cut_chunk(spec, 1).bytes));
  return {.barriers = chunks, .memory_bytes = (spec.world_size + 3.0) * spec.bytes};
}

}  // namespace zeropg

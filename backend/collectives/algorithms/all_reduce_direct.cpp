// All-reduce of tensors in shared memory: every rank reduces its share of all inputs, in rank order, and stores it to
// all outputs. 2 * bytes move per rank, the lower bound: each input is read once, each output written once.
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_all_reduce_direct(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_reduce_direct";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const auto [offset, bytes] = equal_part_of(spec.bytes, spec.world_size, kCacheLineBytes, spec.rank);
  std::vector<Region> sources;
  std::vector<Region> echoes;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) {
    sources.push_back(rank == spec.rank ? input(offset) : peer_input(rank, offset));
    if (rank != spec.rank) echoes.push_back(peer_output(rank, offset));
  }
  Schedule schedule = make_direct_schedule(kName);
  add_reduce_for_all(schedule, output(offset), echoes, sources, bytes);
  add_barrier(schedule);
  return schedule;
}

Cost cost_all_reduce_direct(const CollectiveSpec& spec) { return {.barriers = 2, .memory_bytes = 2.0 * spec.bytes}; }

}  // namespace zeropg

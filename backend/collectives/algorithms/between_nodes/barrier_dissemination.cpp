// Barriers: the node's own, and between nodes a dissemination among their first ranks in log2(m) rounds of one byte,
// the nodes' barriers before and after it.
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_barrier(const CollectiveSpec& spec) {
  return spec.world_size == 1 ? plan_alone("barrier", spec) : make_schedule("barrier", 0);
}

Cost cost_barrier(const CollectiveSpec&) { return {.barriers = 1}; }

Schedule plan_barrier_dissemination(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "barrier_dissemination";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Placement placement(spec);
  const int32_t nodes = placement.node_count();
  Schedule schedule = make_schedule(kName, 0);
  if (placement.local_rank() == 0) {
    schedule.scratch_bytes = 1;
    const Region token{.space = Space::kScratch};
    for (int32_t distance = 1; distance < nodes; distance *= 2) {
      add_send(schedule, placement.rank_at((placement.node() + distance) % nodes, 0), token, 1);
      add_receive(schedule, placement.rank_at((placement.node() - distance + nodes) % nodes, 0), token, 1);
    }
  }
  add_barrier(schedule);
  return schedule;
}

Cost cost_barrier_dissemination(const CollectiveSpec& spec) {
  double hops = 0;
  for (int32_t distance = 1; distance < node_count(spec); distance *= 2) ++hops;
  return {.barriers = 2, .network_hops = hops, .network_bytes = hops, .messages = 2 * hops};
}

}  // namespace zeropg

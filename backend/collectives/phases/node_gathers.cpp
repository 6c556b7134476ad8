#include "backend/collectives/phases/node_gathers.h"

#include <algorithm>

#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

Schedule plan_gather(const char* name, const CollectiveSpec& spec, const BlockPieces& pieces, AddGather add) {
  Schedule schedule = make_schedule(name, pieces.chunks.count * group_count(spec, pieces));
  if (pieces.chunks.count == 0) return schedule;
  add_barrier(schedule);
  const Placement placement(spec);
  add(schedule, spec, pieces, /*has_staging=*/placement.node_size(placement.node()) > 1);  // Note [Alone on a node]
  return schedule;
}

Schedule plan_gather_per_node(const char* name, const CollectiveSpec& spec, const BlockPieces& pieces, AddGather add) {
  Schedule schedule = make_direct_schedule(name);
  add(schedule, spec, pieces, /*has_staging=*/false);
  begin_loop(schedule);
  add_barrier(schedule);  // what the other ranks of the node have received is there
  return schedule;
}

Cost cost_gather(const CollectiveSpec& spec, const BlockPieces& pieces, const GatherWay& way) {
  const double chunks = pieces.chunks.count;
  return {.barriers = 1.0 + chunks * group_count(spec, pieces),
          // Alone, a rank copies its own block and receives the others' in place.
          .memory_bytes = (are_all_alone(spec) ? 2.0 : 2.0 * (spec.world_size + 1 + way.relayed_blocks)) * spec.bytes,
          .network_hops = spec.bytes == 0 ? 0 : way.hops,
          .network_bytes = *std::ranges::max_element(way.links.of_nodes),
          .links = way.links,
          .messages = way.messages_of_chunk * chunks};
}

Cost cost_gather_per_node(const CollectiveSpec& spec, Cost of_gather) {
  of_gather.barriers = 2;
  of_gather.memory_bytes = 2.0 * spec.bytes;  // the own block; all others are received in place
  return of_gather;
}

}  // namespace zeropg

// All-gathers over several nodes, whichever way their blocks take: with outputs of each rank's own, which staging slots
// fill, or with the one output that the ranks of a node share, into which they receive. Both send the same messages, so
// that each node may do the one or the other.
#pragma once

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// `has_staging`: what comes in is staged for all ranks of the node; otherwise it is received where it goes to.
using AddGather = void (*)(Schedule& schedule, const CollectiveSpec& spec, const BlockPieces& pieces, bool has_staging);

Schedule plan_gather(const char* name, const CollectiveSpec& spec, const BlockPieces& pieces, AddGather add);
Schedule plan_gather_per_node(const char* name, const CollectiveSpec& spec, const BlockPieces& pieces, AddGather add);

// What a gather's way costs.
struct GatherWay {
  LinkBytes links;
  double hops = 1;
  double messages_of_chunk = 0;
  int32_t relayed_blocks = 0;  // by the busiest rank
};
Cost cost_gather(const CollectiveSpec& spec, const BlockPieces& pieces, const GatherWay& way);
Cost cost_gather_per_node(const CollectiveSpec& spec, Cost of_gather);

inline bool has_gather_per_node(const CollectiveSpec& spec) { return spec.has_node_output && !spec.output_is_list; }

}  // namespace zeropg

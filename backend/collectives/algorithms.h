// Every algorithm: a pure planner function and its cost, both defined in <op>_<algorithm>.cpp.
#pragma once

#include "backend/collectives/collective.h"
#include "backend/collectives/schedule.h"

namespace zeropg {

// What the busiest rank has to do; multiplied by a CostModel (select.h) it is a time. It must not depend on
// CollectiveSpec::rank, because all ranks have to choose the same algorithm.
struct Cost {
  double barriers = 0;
  double memory_bytes = 0;  // read plus written
};

// Every rank stages its input, and after one barrier reduces the inputs of all: fewest barriers.
Schedule plan_all_reduce_one_shot(const CollectiveSpec& spec);
Cost cost_all_reduce_one_shot(const CollectiveSpec& spec);

// Every rank reduces its share of each chunk for all: fewest bytes. Pipelined, one barrier per chunk and one more.
Schedule plan_all_reduce_staged(const CollectiveSpec& spec);
Cost cost_all_reduce_staged(const CollectiveSpec& spec);

// The following pass each chunk through staging once: one barrier per chunk.
Schedule plan_reduce_staged(const CollectiveSpec& spec);
Cost cost_reduce_staged(const CollectiveSpec& spec);

Schedule plan_reduce_scatter_staged(const CollectiveSpec& spec);
Cost cost_reduce_scatter_staged(const CollectiveSpec& spec);

Schedule plan_all_gather_staged(const CollectiveSpec& spec);
Cost cost_all_gather_staged(const CollectiveSpec& spec);

Schedule plan_gather_staged(const CollectiveSpec& spec);
Cost cost_gather_staged(const CollectiveSpec& spec);

Schedule plan_scatter_staged(const CollectiveSpec& spec);
Cost cost_scatter_staged(const CollectiveSpec& spec);

Schedule plan_broadcast_staged(const CollectiveSpec& spec);
Cost cost_broadcast_staged(const CollectiveSpec& spec);

// One peer after another, at increasing distance, in pieces that fit the mailboxes.
Schedule plan_all_to_all_pairwise(const CollectiveSpec& spec);
Cost cost_all_to_all_pairwise(const CollectiveSpec& spec);

Schedule plan_barrier(const CollectiveSpec& spec);
Cost cost_barrier(const CollectiveSpec& spec);

}  // namespace zeropg

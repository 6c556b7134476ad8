// Barrier: the group's barrier itself.
#include "backend/collectives/algorithms.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_barrier(const CollectiveSpec& spec) {
  return spec.world_size == 1 ? plan_alone("barrier", spec) : make_schedule("barrier", 0);
}

Cost cost_barrier(const CollectiveSpec&) { return {.barriers = 1}; }

}  // namespace zeropg

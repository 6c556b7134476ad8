// Direct algorithms: ranks read, and write, each other's tensors where they lie in memory that all of them share.
//
// Their schedules begin with a barrier, at which every rank learns whether all those tensors do lie there, and end with
// one, since nobody may change a tensor that another rank still reads. They are planned for tensors that are not lists.
#pragma once

#include <cstdint>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// Which tensors of `rank` other ranks reach when this operation runs directly.
struct SharedTensors {
  bool input = false;
  bool output = false;
};
SharedTensors shared_tensors(const CollectiveSpec& spec, int32_t rank);
// The first rank of the node of `rank`, whose output all of the node have where CollectiveSpec::has_node_output.
int32_t first_of_node(const CollectiveSpec& spec, int32_t rank);
// Where the ranks of the own node have the block of `rank` in that output.
Region node_output_block(const CollectiveSpec& spec, int32_t rank, int64_t offset_bytes);

// How much of a rank's input others may read, but in all_to_all, where the rank's own counts say so.
int64_t shared_input_bytes(const CollectiveSpec& spec);
int64_t shared_output_bytes(const CollectiveSpec& spec);

// Whether inputs outside shared memory are better copied from the memory of the process that they lie in (cma.h), which
// takes a system call for each and for every page, than through staging, which copies them twice.
bool pays_to_read(const CollectiveSpec& spec);

// Whether any direct algorithm can serve this specification.
bool can_be_direct(const CollectiveSpec& spec);

}  // namespace zeropg

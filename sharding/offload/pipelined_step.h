// One optimizer step over flat parameters whose state, and perhaps masters, live in a tier.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "sharding/offload/tiered_vector.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

// A stretch [start, stop) of a flat range whose elements take the same step.
struct StepRun {
  int64_t start = 0;
  int64_t stop = 0;
  const Optimizer* optimizer = nullptr;
  StepArguments arguments;
  size_t slots = 0;  // how many of TieredFlat::state it takes, from the first
};

// One flat parameter in one step. All are of the same numel; state and masters of one dtype.
struct TieredFlat {
  std::shared_ptr<TieredVector> tiered_master;       // or
  at::Tensor master;                                 // [numel], any device
  std::vector<std::shared_ptr<TieredVector>> state;  // by slot
  at::Tensor gradient;                               // [numel], any device, as FlatView::gradient; only read
  at::Tensor parameter_out;                          // [numel], any device, or undefined
  std::vector<StepRun> runs;                         // ascending, apart from each other
};

// Steps all runs. Blocks. Chunks of all flat parameters form one sequence, so that small ones overlap too: while one is
// stepped, the next is read and the one before is written back; nothing is under way when this returns. The result is,
// bit for bit, that of Optimizer::step over the whole (Note [Same bits] in sharding/optim/elementwise.h).
//
// TierError: some chunks have been stepped and others not: masters and state are of no use until they are loaded again.
void pipelined_step(Offload& offload, const std::vector<TieredFlat>& flats);

}  // namespace zeropg

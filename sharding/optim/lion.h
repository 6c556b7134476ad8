// Lion over flat ranges.
//
// Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2. Order of operations:
// zeropg.optim.Lion. The sign of 0 is 0, so that padding stays zero; that of a NaN is a NaN, so that it is seen.
#pragma once

#include "sharding/optim/elementwise.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

class Lion final : public Optimizer {
 public:
  explicit Lion(Isa isa = best_isa()) : isa_(isa) {}

  OptimizerTraits traits() const override;
  // exp_avg.
  std::vector<StateSlot> state_slots(const Hyperparameters& hyperparameters) const override;
  void step(const FlatView& view, const StepArguments& arguments) const override;

 private:
  const Isa isa_;
};

}  // namespace zeropg

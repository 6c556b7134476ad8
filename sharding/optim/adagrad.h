// Adagrad over flat ranges.
//
// Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011. Order of
// operations: torch.optim.adagrad._single_tensor_adagrad.
#pragma once

#include "sharding/optim/elementwise.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

class Adagrad final : public Optimizer {
 public:
  explicit Adagrad(Isa isa = best_isa()) : isa_(isa) {}

  OptimizerTraits traits() const override;
  // sum.
  std::vector<StateSlot> state_slots(const Hyperparameters& hyperparameters) const override;
  // In the first step (arguments.step == 1) initial_accumulator_value is added to what the slot holds: to zeros. Where
  // somebody has put a sum there, pass 0.
  void step(const FlatView& view, const StepArguments& arguments) const override;

 private:
  const Isa isa_;
};

}  // namespace zeropg

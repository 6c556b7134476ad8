// Stochastic gradient descent with momentum, dampening, Nesterov's momentum and weight decay over flat ranges.
// Source and order of operations: torch.optim.sgd._single_tensor_sgd.
#pragma once

#include "sharding/optim/elementwise.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

class Sgd final : public Optimizer {
 public:
  explicit Sgd(Isa isa = best_isa()) : isa_(isa) {}

  OptimizerTraits traits() const override;
  // momentum_buffer, unless momentum is 0.
  std::vector<StateSlot> state_slots(const Hyperparameters& hyperparameters) const override;
  // arguments.step == 1 is the step that sets momentum_buffer to the gradient, undampened.
  void step(const FlatView& view, const StepArguments& arguments) const override;

 private:
  const Isa isa_;
};

}  // namespace zeropg

// Adam and AdamW over flat ranges.
//
// Source: Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm
// 2; AMSGrad: Reddi et al., 2018. Order of operations: torch.optim.adam._single_tensor_adam, with one difference:
// sqrt(v) is multiplied by 1 / sqrt(bias correction) instead of divided (at most 1 ulp of the denominator, and one
// division less). With compact state the update is that of float32: moments are rounded after it (state_format.h).
#pragma once

#include "sharding/optim/elementwise.h"
#include "sharding/optim/optimizer.h"

namespace zeropg {

// kCoupled adds weight_decay * p to the gradient (Adam); kDecoupled shrinks p by lr * weight_decay (AdamW).
enum class WeightDecay : uint8_t { kCoupled, kDecoupled };

// Of exp_avg and exp_avg_sq: kMaster's bits, bfloat16, or blocks of 8-bit codes.
enum class StateBits : uint8_t { k32 = 32, k16 = 16, k8 = 8 };

class AdamW final : public Optimizer {
 public:
  AdamW(WeightDecay weight_decay, StateBits bits, Isa isa = best_isa())
      : weight_decay_(weight_decay), bits_(bits), isa_(isa) {}

  OptimizerTraits traits() const override;
  // exp_avg, exp_avg_sq, and max_exp_avg_sq with amsgrad, which k32 alone has.
  std::vector<StateSlot> state_slots(const Hyperparameters& hyperparameters) const override;
  void step(const FlatView& view, const StepArguments& arguments) const override;

 private:
  const WeightDecay weight_decay_;
  const StateBits bits_;
  const Isa isa_;
};

}  // namespace zeropg

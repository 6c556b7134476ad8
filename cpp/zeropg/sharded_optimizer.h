// Any elementwise optimizer of torch::optim, over the part of each parameter that this rank updates.
#pragma once

#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <zeropg/fully_sharded_module.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeropg {

// From stage 1 on each rank holds the optimizer's state of its own part only. `Optimizer`: torch::optim::AdamW, SGD,
// ...: what updates each element from its own gradient and state. Call step() on all ranks.
template <typename Optimizer>
class ShardedOptimizer {
  static_assert(!std::is_same_v<Optimizer, torch::optim::LBFGS>,
                "zeropg: LBFGS needs whole parameters and gradients; use an elementwise optimizer");

 public:
  // Over all trainable parameters, with one set of options (torch::optim::AdamWOptions(1e-3)).
  template <typename M, typename Options>
  ShardedOptimizer(FullyShardedModule<M>& model, Options options)
      : core_(model.core()), optimizer_(local_tensors(), std::move(options)) {}

  // Over groups of the model's own parameters; a group without options has the defaults.
  template <typename M, typename Options>
  ShardedOptimizer(FullyShardedModule<M>& model, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   Options defaults)
      : core_(model.core()), optimizer_(local_groups(groups), std::move(defaults)) {}

  // Updates the parameters from the averaged gradients. Collective.
  void step() {
    core_->begin_step();
    try {
      optimizer_.step();
    } catch (...) {
      core_->end_step();  // the other ranks are there
      throw;
    }
    core_->end_step();
  }

  // Drops the gradients of all parameters of its groups.
  void zero_grad() {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }

  // The optimizer over this rank's parts, for learning rates and schedulers; its own step() must not be called.
  Optimizer& operator*() { return optimizer_; }
  Optimizer* operator->() { return &optimizer_; }

 private:
  std::vector<at::Tensor> local_tensors() {
    std::vector<at::Tensor> tensors;
    for (const auto& range : core_->update_ranges()) {
      parameters_.push_back(range.parameter);
      if (range.values.defined()) {
        tensors.push_back(range.values);
      }
    }
    return tensors;
  }

  std::vector<torch::optim::OptimizerParamGroup> local_groups(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::vector<torch::optim::OptimizerParamGroup> result;
    for (const auto& group : groups) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& parameter : group.params()) {
        for (const auto& range : core_->update_ranges()) {
          if (range.parameter.is_same(parameter) && range.values.defined()) {
            tensors.push_back(range.values);
          }
        }
        parameters_.push_back(parameter);
      }
      result.push_back(group.has_options() ? torch::optim::OptimizerParamGroup(tensors, group.options().clone())
                                           : torch::optim::OptimizerParamGroup(tensors));
    }
    return result;
  }

  std::shared_ptr<ShardedCore> core_;
  std::vector<at::Tensor> parameters_;
  Optimizer optimizer_;
};

}  // namespace zeropg

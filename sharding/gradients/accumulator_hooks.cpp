#include "sharding/gradients/accumulator_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace zeropg {
namespace {

class LambdaPreHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<void()> function) : function_(std::move(function)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    function_();
    return gradients;
  }

 private:
  std::function<void()> function_;
};

}  // namespace

bool AccumulatorHooks::are_on(const at::Tensor& parameter) const {
  return accumulator_ != nullptr && accumulator_ == torch::autograd::impl::try_get_grad_accumulator(parameter);
}

void AccumulatorHooks::install(const at::Tensor& parameter, std::function<void()> before, std::function<void()> after) {
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter);
  accumulator_->add_pre_hook(std::make_unique<LambdaPreHook>(std::move(before)));
  accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [after = std::move(after)](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
        after();
        return outputs;
      }));
}

bool AccumulatorHooks::will_run() const {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  const auto found = executed->find(accumulator_.get());
  return found != executed->end() && found->second.needed_;
}

void AccumulatorHooks::hold_users_hook(const at::Tensor& parameter) {
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (hook != nullptr) {
    users_hook_ = std::move(hook);
  }
}

void AccumulatorHooks::give_users_hook_back(const at::Tensor& parameter) {
  if (users_hook_ != nullptr) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
    if (hook == nullptr) {
      hook = std::move(users_hook_);
    }
    users_hook_.reset();
  }
}

void AccumulatorHooks::run_users_hook(const at::Tensor& parameter) {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (hook != nullptr) {
    (*hook)(parameter);
  }
}

}  // namespace zeropg

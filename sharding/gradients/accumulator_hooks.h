// Hooks around the moment when autograd accumulates one parameter's gradient, and the user's own hook after it.
//
// Post-accumulate-grad hooks of users (an optimizer inside backward) must see the reduced gradient, so they are held
// back until backward has ended; hooks on the tensor itself run as ever and see the local one.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace zeropg {

class AccumulatorHooks {
 public:
  // Whether the hooks are on what accumulates into `parameter` now: torch makes a new accumulator where a parameter's
  // data was set (p.set_(), another dtype and back).
  bool are_on(const at::Tensor& parameter) const;
  // `before` is called before each gradient is accumulated, `after` after it.
  void install(const at::Tensor& parameter, std::function<void()> before, std::function<void()> after);
  // Whether the autograd task that runs puts a gradient into `.grad`, where it runs only what was asked for.
  bool will_run() const;

  void hold_users_hook(const at::Tensor& parameter);
  void give_users_hook_back(const at::Tensor& parameter);
  static void run_users_hook(const at::Tensor& parameter);

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  Accumulator accumulator_;  // the parameter holds it weakly, the hooks live on it
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> users_hook_;  // held back until backward has ended
};

}  // namespace zeropg

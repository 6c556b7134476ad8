// The gradient of one parameter as autograd and the user see it: hooks around the moment when autograd accumulates it,
// and what `.grad` is between backwards.
//
// Note [What .grad is]
// autograd accumulates into a fresh tensor (ours is taken away before, so user hooks see the local gradient), which is
// added to the bucket. Afterwards `.grad` is a stand-in: where gradients are replicated, a view of the averaged
// gradient; where they are sharded, a tensor of the full shape whose data raises. It is never None after a backward
// that produced a gradient on any rank; setting it to None drops what has been accumulated, and a tensor (or data) that
// the user puts there takes its place. Both are noticed when the gradient is next needed (GradientBucket::absorb).
// What the user keeps of it stays as it is when the gradient is dropped, as in plain torch. Hooks of users on the
// tensor run as ever; their post-accumulate-grad hooks (an optimizer inside backward) must see the reduced gradient, so
// they are held back until backward has ended.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "sharding/parameters/parameter_tensors.h"

namespace zeropg {

class GradView {
 public:
  explicit GradView(ParameterTensors tensors) : tensors_(std::move(tensors)) {}

  const at::Tensor& gradient() const { return tensors_.parameter.grad(); }

  // Whether hooks are on what accumulates into the parameter now: torch makes a new accumulator where a parameter's
  // data was set (p.set_(), another dtype and back).
  bool is_watched() const;
  // `before` is called before each gradient is accumulated, `after` after it.
  void watch(std::function<void()> before, std::function<void()> after);
  // Whether the autograd task that runs puts a gradient into `.grad`, where it runs only what was asked for.
  bool will_accumulate() const;

  // `values` are of a distributed parameter's local part, and `.grad` a tensor of its kind over them.
  // `.grad` becomes a view of `values` [numel], in the shape of the parameter; the same tensor as long as that is one.
  void show(const at::Tensor& values);
  // `.grad` becomes a tensor whose data raises: each rank holds a part of the gradient.
  void show_sharded(const std::string& name);
  // The same, because a backward inside no_sync has added to an average.
  void show_unreduced(const std::string& name);
  // `.grad` says that what was accumulated is lost, until the user drops or replaces it.
  void show_lost(const std::string& name);
  bool is_lost() const { return is_lost_ && is_shown(); }
  // What was shown counts as any other tensor of the user's from now on.
  void forget();

  // `.grad` becomes `values` [numel] in the shape of the parameter, for the user to read and change until end_full().
  void show_full(const at::Tensor& values);
  bool is_full() const { return is_full_; }
  void end_full() { is_full_ = false; }

  // Before autograd accumulates: hides what is shown, so that hooks see the local gradient alone, and holds the user's
  // post-accumulate hook back.
  void take_away();
  // Drops the local gradient, which is in the bucket now, for what was taken away.
  void put_back();
  // After a backward that raised: the same where something was taken away. What was shown is dropped, and where
  // `had_gradient` `.grad` says that it is lost.
  void abandon(bool had_gradient, const std::string& name);

  // The post-accumulate hook of the user, when backward has ended.
  void give_hook_back();
  void run_hook() const;

  // Whether `.grad` is what was shown, with the data that it had.
  bool is_shown() const;
  // Points what was shown, whoever has it, into other memory of the same values.
  void move_to(const at::Tensor& values) const;

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  at::Tensor lock() const;
  bool has_own_data(const at::Tensor& shown) const;
  void make_handle(const std::string& message);
  void put(const at::Tensor& tensor, const at::Tensor& local);
  void show_unreadable(const std::string& message);

  ParameterTensors tensors_;
  Accumulator accumulator_;  // the parameter holds it weakly, the hooks live on it
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> users_hook_;  // held back
  WeakTensor shown_{at::Tensor().getIntrusivePtr()};
  at::Tensor handle_;       // keeps an unreadable tensor for the next time
  at::Tensor handle_data_;  // what it is over
  at::Tensor taken_away_;   // what `.grad` showed, while autograd puts another there
  bool is_lost_ = false;
  bool is_full_ = false;  // `.grad` is what show_full has put there, or the user after it
  // Where the data of what was shown is: it may have been replaced (`p.grad.data = ...`).
  mutable const c10::StorageImpl* storage_ = nullptr;
  mutable int64_t offset_ = 0;
};

}  // namespace zeropg

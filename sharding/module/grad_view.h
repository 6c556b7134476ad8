// What `.grad` of one parameter is between backwards.
//
// Note [What .grad is]
// autograd accumulates into a fresh tensor (ours is taken away before, so user hooks see the local gradient), which is
// added to the bucket. Afterwards `.grad` is a stand-in: where gradients are replicated, a view of the averaged
// gradient; where they are sharded, a tensor of the full shape whose data raises. It is never None after a backward
// that produced a gradient on any rank; setting it to None drops what has been accumulated, and a tensor (or data) that
// the user puts there takes its place. Both are noticed when the gradient is next needed (GradientReducer::absorb).
// What the user keeps of it stays as it is when the gradient is dropped, as in plain torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace zeropg {

class GradView {
 public:
  // `.grad` becomes a view of `values` [numel], in the shape of the parameter; the same tensor as long as that is one.
  void show(const at::Tensor& parameter, const at::Tensor& values);
  // `.grad` becomes a tensor whose data raises `message`.
  void show_unreadable(const at::Tensor& parameter, const std::string& message);
  // `.grad` says that what was accumulated is lost, until the user drops or replaces it.
  void show_lost(const at::Tensor& parameter, const std::string& name);
  bool is_lost(const at::Tensor& parameter) const { return is_lost_ && is_shown(parameter); }

  // What was shown counts as any other tensor of the user's from now on.
  void forget();

  // Whether `.grad` is what was shown, with the data that it had.
  bool is_shown(const at::Tensor& parameter) const;
  // Whether the tensor that was shown is alive, in `.grad` or with the user.
  bool is_alive() const { return !shown_.expired(); }
  // Points what was shown, whoever has it, into other memory of the same values.
  void move_to(const at::Tensor& values) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  at::Tensor lock() const;
  void put(const at::Tensor& parameter, const at::Tensor& tensor);

  WeakTensor shown_{at::Tensor().getIntrusivePtr()};
  at::Tensor handle_;  // keeps an unreadable tensor for the next time
  bool is_lost_ = false;
  // Where the data of what was shown is: it may have been replaced (`p.grad.data = ...`).
  mutable const c10::StorageImpl* storage_ = nullptr;
  mutable int64_t offset_ = 0;
};

}  // namespace zeropg

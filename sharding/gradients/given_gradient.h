// A tensor that the user has put into `.grad`, once its values have been taken: it stands there no more.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeropg {

class GivenGradient {
 public:
  // `gradient`: this rank's part of a distributed one.
  void note(const at::Tensor& gradient) {
    if (gradient.is_inference()) return forget();  // it does not count its writes
    tensor_ = WeakTensor(gradient.getIntrusivePtr());
    version_ = gradient._version();
  }
  void forget() { tensor_.reset(); }

  // Whether the user, who has it still, has written to it since.
  bool is_written() const {
    const at::Tensor tensor(tensor_.lock());
    return tensor.defined() && tensor._version() != version_;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  WeakTensor tensor_{at::Tensor().getIntrusivePtr()};
  uint32_t version_ = 0;
};

}  // namespace zeropg

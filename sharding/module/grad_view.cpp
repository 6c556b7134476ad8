#include "sharding/module/grad_view.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "sharding/parameters/parameter_storage.h"

namespace zeropg {
namespace {

// Not a view for autograd: what it shares memory with is nobody's business.
at::Tensor over(const at::Tensor& values, at::IntArrayRef sizes) {
  at::NoGradGuard no_grad;
  return at::empty({0}, values.options()).set_(values.storage(), values.storage_offset(), sizes);
}

}  // namespace

at::Tensor GradView::lock() const { return at::Tensor(shown_.lock()); }

void GradView::put(const at::Tensor& parameter, const at::Tensor& tensor) {
  shown_ = WeakTensor(tensor.getIntrusivePtr());
  storage_ = tensor.storage().unsafeGetStorageImpl();
  offset_ = tensor.storage_offset();
  parameter.mutable_grad() = tensor;  // Python's setter would refuse another dtype
}

void GradView::show(const at::Tensor& parameter, const at::Tensor& values) {
  is_lost_ = false;
  at::Tensor before = lock();
  const bool is_same = before.defined() && before.storage().unsafeGetStorageImpl() == storage_ &&
                       values.storage().unsafeGetStorageImpl() == storage_ && values.storage_offset() == offset_ &&
                       before.storage_offset() == offset_ && before.sizes() == parameter.sizes();
  put(parameter, is_same ? before : over(values, parameter.sizes()));
}

void GradView::show_unreadable(const at::Tensor& parameter, const std::string& message) {
  if (is_lost_ || !handle_.defined() || !is_sharded(handle_)) {
    handle_ = make_unreadable(parameter.sizes(), parameter.options(), message);
  }
  is_lost_ = false;
  put(parameter, handle_);
}

void GradView::show_lost(const at::Tensor& parameter, const std::string& name) {
  handle_ = make_unreadable(parameter.sizes(), parameter.options(),
                            "[zeropg] the gradient of '" + name +
                                "' was dropped: a backward raised an error, and what earlier ones had accumulated went "
                                "with it. Call zero_grad() and repeat the accumulation from its first backward.");
  is_lost_ = true;
  put(parameter, handle_);
}

void GradView::forget() {
  shown_.reset();
  is_lost_ = false;
}

bool GradView::is_shown(const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && !shown_.expired() && gradient.unsafeGetTensorImpl() == shown_._unsafe_get_target() &&
         gradient.has_storage() && gradient.storage().unsafeGetStorageImpl() == storage_ &&
         gradient.storage_offset() == offset_ && gradient.sizes() == parameter.sizes() && gradient.is_contiguous();
}

void GradView::move_to(const at::Tensor& values) const {
  at::Tensor tensor = lock();
  if (tensor.defined()) {
    tensor.set_data(over(values, tensor.sizes()));
    storage_ = tensor.storage().unsafeGetStorageImpl();
    offset_ = tensor.storage_offset();
  }
}

}  // namespace zeropg

#include "sharding/gradients/grad_view.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "sharding/gradients/lambda_pre_hook.h"
#include "sharding/parameters/parameter_storage.h"

namespace zeropg {
namespace {

// Not a view for autograd: what it shares memory with is nobody's business.
at::Tensor over(const at::Tensor& values, at::IntArrayRef sizes) {
  at::NoGradGuard no_grad;
  return at::empty({0}, values.options()).set_(values.storage(), values.storage_offset(), sizes);
}

}  // namespace

// --- while autograd accumulates ---

bool GradView::is_watched() const {
  return accumulator_ != nullptr && accumulator_ == torch::autograd::impl::try_get_grad_accumulator(parameter_);
}

void GradView::watch(std::function<void()> before, std::function<void()> after) {
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter_);
  accumulator_->add_pre_hook(std::make_unique<LambdaPreHook>(std::move(before)));
  accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [after = std::move(after)](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
        after();
        return outputs;
      }));
}

bool GradView::will_accumulate() const {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  const auto found = executed->find(accumulator_.get());
  return found != executed->end() && found->second.needed_;
}

void GradView::take_away() {
  if (is_shown()) {
    taken_away_ = std::exchange(parameter_.mutable_grad(), at::Tensor());
  }
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_);
  if (hook != nullptr) {
    users_hook_ = std::move(hook);
  }
}

void GradView::put_back() { parameter_.mutable_grad() = std::exchange(taken_away_, at::Tensor()); }

void GradView::give_hook_back() {
  if (users_hook_ != nullptr) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_);
    if (hook == nullptr) {
      hook = std::move(users_hook_);
    }
    users_hook_.reset();
  }
}

void GradView::run_hook() const {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_);
  if (hook != nullptr) {
    (*hook)(parameter_);
  }
}

// --- between backwards ---

at::Tensor GradView::lock() const { return at::Tensor(shown_.lock()); }

void GradView::put(const at::Tensor& tensor) {
  shown_ = WeakTensor(tensor.getIntrusivePtr());
  storage_ = tensor.storage().unsafeGetStorageImpl();
  offset_ = tensor.storage_offset();
  parameter_.mutable_grad() = tensor;  // Python's setter would refuse another dtype
}

void GradView::show(const at::Tensor& values) {
  is_lost_ = false;
  at::Tensor before = lock();
  const bool is_same = before.defined() && before.storage().unsafeGetStorageImpl() == storage_ &&
                       values.storage().unsafeGetStorageImpl() == storage_ && values.storage_offset() == offset_ &&
                       before.storage_offset() == offset_ && before.sizes() == parameter_.sizes();
  put(is_same ? before : over(values, parameter_.sizes()));
}

void GradView::show_unreadable(const std::string& message) {
  if (is_lost_ || !handle_.defined() || !is_sharded(handle_)) {
    handle_ = make_unreadable(parameter_.sizes(), parameter_.options(), message);
  }
  is_lost_ = false;
  put(handle_);
}

void GradView::show_sharded(const std::string& name) {
  show_unreadable("[zeropg] the gradient of '" + name +
                  "' is sharded: each rank holds a part of it. Clip with zeropg.clip_grad_norm_(model, max_norm); read "
                  "it whole inside `with zeropg.full_gradients(model):`.");
}

void GradView::show_unreduced(const std::string& name) {
  show_unreadable("[zeropg] the gradient of '" + name +
                  "' is not reduced yet: zeropg.no_sync(model) has added to an earlier one. Read it after a backward "
                  "outside of no_sync.");
}

void GradView::show_lost(const std::string& name) {
  handle_ = make_unreadable(parameter_.sizes(), parameter_.options(),
                            "[zeropg] the gradient of '" + name +
                                "' was dropped: a backward raised an error, and what earlier ones had accumulated went "
                                "with it. Call zero_grad() and repeat the accumulation from its first backward.");
  is_lost_ = true;
  put(handle_);
}

void GradView::forget() {
  shown_.reset();
  is_lost_ = false;
}

void GradView::show_full(const at::Tensor& values) {
  is_full_ = true;
  parameter_.mutable_grad() = values.view(parameter_.sizes());
}

void GradView::abandon(bool had_gradient, const std::string& name) {
  if (taken_away_.defined()) {
    put_back();
  }
  if (is_full_ || is_shown()) {
    parameter_.mutable_grad().reset();
    if (had_gradient) {
      show_lost(name);
    }
  }
  is_full_ = false;
}

bool GradView::is_shown() const {
  const at::Tensor& gradient = parameter_.grad();
  return gradient.defined() && !shown_.expired() && gradient.unsafeGetTensorImpl() == shown_._unsafe_get_target() &&
         gradient.has_storage() && gradient.storage().unsafeGetStorageImpl() == storage_ &&
         gradient.storage_offset() == offset_ && gradient.sizes() == parameter_.sizes() && gradient.is_contiguous();
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

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
at::Tensor in_shape(const at::Tensor& values, at::IntArrayRef sizes) {
  at::NoGradGuard no_grad;
  return at::empty({0}, values.options()).set_(values.storage(), values.storage_offset(), sizes);
}

}  // namespace

// --- while autograd accumulates ---

bool GradView::is_watched() const {
  return accumulator_ != nullptr && accumulator_ == torch::autograd::impl::try_get_grad_accumulator(tensors_.parameter);
}

void GradView::watch(std::function<void()> before, std::function<void()> after) {
  accumulator_ = torch::autograd::impl::grad_accumulator(tensors_.parameter);
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
    taken_away_ = std::exchange(tensors_.parameter.mutable_grad(), at::Tensor());
  }
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensors_.parameter);
  if (hook != nullptr) {
    users_hook_ = std::move(hook);
  }
}

void GradView::put_back() { tensors_.parameter.mutable_grad() = std::exchange(taken_away_, at::Tensor()); }

void GradView::give_hook_back() {
  if (users_hook_ != nullptr) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensors_.parameter);
    if (hook == nullptr) {
      hook = std::move(users_hook_);
    }
    users_hook_.reset();
  }
}

void GradView::run_hook() const {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensors_.parameter);
  if (hook != nullptr) {
    (*hook)(tensors_.parameter);
  }
}

// --- between backwards ---

at::Tensor GradView::lock() const { return at::Tensor(shown_.lock()); }

void GradView::put(const at::Tensor& tensor, const at::Tensor& local) {
  shown_ = WeakTensor(tensor.getIntrusivePtr());
  storage_ = local.storage().unsafeGetStorageImpl();
  offset_ = local.storage_offset();
  tensors_.parameter.mutable_grad() = tensor;  // Python's setter would refuse another dtype
}

void GradView::show(const at::Tensor& values) {
  is_lost_ = false;
  const at::Tensor before = lock();
  const bool is_same = before.defined() && has_own_data(before) &&
                       values.storage().unsafeGetStorageImpl() == storage_ && values.storage_offset() == offset_;
  const at::Tensor local = is_same ? values : in_shape(values, tensors_.local.sizes());
  put(is_same ? before : tensors_.over(local), local);
}

void GradView::show_unreadable(const std::string& message) {
  if (is_lost_ || !handle_.defined() || !is_sharded(handle_data_)) {
    make_handle(message);
  }
  is_lost_ = false;
  put(handle_, handle_data_);
}

void GradView::make_handle(const std::string& message) {
  handle_data_ = make_unreadable(tensors_.local.sizes(), tensors_.local.options(), message);
  handle_ = tensors_.over(handle_data_);
}

void GradView::show_sharded(const std::string& name) {
  show_unreadable("[zeropg] the gradient of '" + name +
                  "' is sharded: each rank holds a part of it. Step with what zeropg.shard_optimizer(optimizer, model) "
                  "returns, clip with zeropg.clip_grad_norm_(model, max_norm), and read it whole inside "
                  "`with zeropg.full_gradients(model):`.");
}

void GradView::show_unreduced(const std::string& name) {
  show_unreadable("[zeropg] the gradient of '" + name +
                  "' is not reduced yet: zeropg.no_sync(model) has added to an earlier one. Read it after a backward "
                  "outside of no_sync.");
}

void GradView::show_lost(const std::string& name) {
  make_handle("[zeropg] the gradient of '" + name +
              "' was dropped: a backward raised an error, and what earlier ones had accumulated went with it. Call "
              "zero_grad() and repeat the accumulation from its first backward.");
  is_lost_ = true;
  put(handle_, handle_data_);
}

void GradView::forget() {
  shown_.reset();
  is_lost_ = false;
}

void GradView::show_full(const at::Tensor& values) {
  is_full_ = true;
  tensors_.parameter.mutable_grad() = tensors_.over(values.view(tensors_.local.sizes()));
}

void GradView::abandon(bool had_gradient, const std::string& name) {
  if (taken_away_.defined()) {
    put_back();
  }
  if (is_full_ || is_shown()) {
    tensors_.parameter.mutable_grad().reset();
    if (had_gradient) {
      show_lost(name);
    }
  }
  is_full_ = false;
}

bool GradView::is_shown() const {
  const at::Tensor& gradient = tensors_.parameter.grad();
  return gradient.defined() && !shown_.expired() && gradient.unsafeGetTensorImpl() == shown_._unsafe_get_target() &&
         has_own_data(gradient);
}

// Whether what was shown has the data that it had. A distributed tensor has no data that could be replaced: what is
// written to it reaches the local part that it is over.
bool GradView::has_own_data(const at::Tensor& shown) const {
  return tensors_.distributed != nullptr ||
         (shown.has_storage() && shown.storage().unsafeGetStorageImpl() == storage_ &&
          shown.storage_offset() == offset_ && shown.sizes() == tensors_.local.sizes() && shown.is_contiguous());
}

void GradView::move_to(const at::Tensor& values) const {
  at::Tensor shown = lock();
  if (shown.defined()) {
    const at::Tensor tensor = tensors_.local_of(shown);
    tensor.set_data(in_shape(values, tensor.sizes()));
    storage_ = tensor.storage().unsafeGetStorageImpl();
    offset_ = tensor.storage_offset();
  }
}

}  // namespace zeropg

#include "sharding/parameters/parameter_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace zeropg {
namespace {

int64_t bytes_of(at::IntArrayRef sizes, c10::ScalarType dtype) {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

// A contiguous tensor over the whole of `storage`.
at::Tensor tensor_over(const c10::intrusive_ptr<WatchedStorage>& storage, at::IntArrayRef sizes,
                       const at::TensorOptions& options) {
  at::Tensor tensor = at::empty({0}, options.requires_grad(false));
  tensor.set_(c10::Storage(storage), 0, sizes);
  return tensor;
}

}  // namespace

WatchedStorage::Target target_in(const at::Tensor& tensor, int64_t offset_numel) {
  const c10::Storage& storage = tensor.storage();
  char* base = static_cast<char*>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  return {storage, base + (tensor.storage_offset() + offset_numel) * static_cast<int64_t>(tensor.element_size())};
}

ParameterStorage::ParameterStorage(const at::Tensor& parameter, c10::ScalarType dtype, std::string sharded_message)
    : storage_(c10::make_intrusive<WatchedStorage>(bytes_of(parameter.sizes(), dtype), parameter.device())),
      dtype_(dtype),
      sizes_(parameter.sizes().vec()),
      sharded_message_(std::move(sharded_message)),
      before_write_(std::make_unique<WatchedStorage::BeforeWrite>()) {
  take_back(parameter);
  detach();
}

ParameterStorage::~ParameterStorage() {
  if (storage_) {
    storage_->stop_watching();
  }
}

void ParameterStorage::set_before_write(WatchedStorage::BeforeWrite before_write) {
  *before_write_ = std::move(before_write);
}

void ParameterStorage::attach(const at::Tensor& flat, int64_t offset_numel, bool is_watched) {
  storage_->point_at(target_in(flat, offset_numel), is_watched && *before_write_ ? before_write_.get() : nullptr);
  is_attached_ = true;
}

void ParameterStorage::detach(const std::string& message) {
  storage_->point_at_nothing(message);
  is_attached_ = false;
}

bool ParameterStorage::is_used_by(const at::Tensor& parameter) const {
  return parameter.has_storage() && parameter.storage().unsafeGetStorageImpl() == storage_.get() &&
         storage_->is_in_place() && parameter.sizes() == sizes_ && parameter.is_contiguous() &&
         parameter.storage_offset() == 0;
}

void ParameterStorage::leave_to_aliases() {
  const WatchedStorage::Target target = storage_->target();
  const bool is_watched = storage_->is_watched();
  const at::TensorOptions options = at::TensorOptions().dtype(dtype_).device(storage_->device());
  const at::Tensor copy = tensor_over(storage_, sizes_, options).clone();
  storage_->point_at(target_in(copy, 0), nullptr);
  storage_ = c10::make_intrusive<WatchedStorage>(bytes_of(sizes_, dtype_), storage_->device());
  storage_->point_at(target, is_watched ? before_write_.get() : nullptr);
}

void ParameterStorage::take_back(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  if (is_attached_ && storage_.use_count() > 1) {
    leave_to_aliases();
  }
  parameter.set_data(tensor_over(storage_, sizes_, parameter.options().dtype(dtype_)));
}

bool is_sharded(const at::Tensor& tensor) {
  return tensor.has_storage() && dynamic_cast<WatchedStorage*>(tensor.storage().unsafeGetStorageImpl()) != nullptr;
}

at::Tensor make_unreadable(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message) {
  at::NoGradGuard no_grad;
  const auto storage = c10::make_intrusive<WatchedStorage>(bytes_of(sizes, c10::typeMetaToScalarType(options.dtype())),
                                                           options.device());
  at::Tensor tensor = tensor_over(storage, sizes, options);
  storage->point_at_nothing(message);
  return tensor;
}

at::Tensor make_read_only(const at::Tensor& tensor, const std::string& message,
                          const std::function<void(WatchedStorage&)>& on_pointer) {
  at::NoGradGuard no_grad;
  const auto storage =
      c10::make_intrusive<WatchedStorage>(bytes_of(tensor.sizes(), tensor.scalar_type()), tensor.device());
  at::Tensor view = tensor_over(storage, tensor.sizes(), tensor.options());
  storage->refuse_writes(target_in(tensor, 0), message, on_pointer);
  return view;
}

}  // namespace zeropg

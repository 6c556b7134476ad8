#include "sharding/parameter_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <memory>

namespace zeropg {
namespace {

// Note [Storage guards]
// c10::StorageImpl can be told to throw on access, but only torch 2.15 can take back one of the two flags, and none
// takes back the other. An explicit instantiation may name private members (C++20, [temp.spec.general]/6), so the flags
// are reached without relying on the layout of the class.
template <typename Tag, typename Tag::type Member>
struct Expose {
  friend constexpr typename Tag::type member_of(Tag) { return Member; }
};
struct ThrowOnRead {
  using type = bool c10::StorageImpl::*;
  friend constexpr type member_of(ThrowOnRead);
};
struct ThrowOnWrite {
  using type = bool c10::StorageImpl::*;
  friend constexpr type member_of(ThrowOnWrite);
};
template struct Expose<ThrowOnRead, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Expose<ThrowOnWrite, &c10::StorageImpl::throw_on_mutable_data_ptr_>;

void clear_guards(c10::StorageImpl& storage) {
  storage.*member_of(ThrowOnRead{}) = false;
  storage.*member_of(ThrowOnWrite{}) = false;
}

c10::intrusive_ptr<c10::StorageImpl> make_empty_storage(int64_t bytes, c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                                               /*resizable=*/false);
}

void delete_owner(void* owner) { delete static_cast<c10::Storage*>(owner); }

}  // namespace

ParameterStorage::ParameterStorage(const at::Tensor& parameter, c10::ScalarType dtype, std::string sharded_message)
    : sharded_message_(std::move(sharded_message)) {
  at::NoGradGuard no_grad;
  const int64_t bytes = parameter.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  storage_ = make_empty_storage(bytes, parameter.device());
  at::Tensor replacement = at::empty({0}, parameter.options().dtype(dtype).requires_grad(false));
  replacement.set_(c10::Storage(storage_), 0, parameter.sizes());
  parameter.set_data(replacement);
  detach();
}

void ParameterStorage::attach(const at::Tensor& flat, int64_t offset_numel, bool guarded) {
  auto* owner = new c10::Storage(flat.storage());
  char* base = static_cast<char*>(owner->unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  char* address = base + (flat.storage_offset() + offset_numel) * static_cast<int64_t>(flat.element_size());
  clear_guards(*storage_);
  storage_->set_data_ptr_noswap(c10::DataPtr(address, owner, &delete_owner, flat.device()));
  if (guarded) {
    storage_->set_throw_on_mutable_data_ptr();
  }
  is_attached_ = true;
}

void ParameterStorage::detach() {
  clear_guards(*storage_);
  storage_->set_data_ptr_noswap(c10::DataPtr(nullptr, storage_->device()));
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(sharded_message_);
  is_attached_ = false;
}

bool ParameterStorage::is_used_by(const at::Tensor& parameter) const {
  return parameter.has_storage() && parameter.storage().unsafeGetStorageImpl() == storage_.get();
}

bool is_sharded(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return false;
  }
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  return storage.*member_of(ThrowOnRead{}) || storage._mutable_data_ptr_no_checks().get_deleter() == &delete_owner;
}

at::Tensor make_unreadable(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message) {
  at::NoGradGuard no_grad;
  at::Tensor tensor = at::empty({0}, options.requires_grad(false));
  int64_t numel = 1;
  for (int64_t size : sizes) {
    numel *= size;
  }
  auto storage = make_empty_storage(numel * static_cast<int64_t>(tensor.element_size()), tensor.device());
  tensor.set_(c10::Storage(storage), 0, sizes);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return tensor;
}

}  // namespace zeropg

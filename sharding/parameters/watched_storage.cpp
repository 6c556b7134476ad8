#include "sharding/parameters/watched_storage.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace zeropg {
namespace {

// Note [Storage guards]
// c10::StorageImpl can be told to throw on access, but only torch 2.15 can take that back. An explicit instantiation
// may name private members (C++20, [temp.spec.general]/6), so the flag is reached without relying on the layout of the
// class.
template <typename Tag, typename Tag::type Member>
struct Expose {
  friend constexpr typename Tag::type member_of(Tag) { return Member; }
};
struct ThrowOnRead {
  using type = bool c10::StorageImpl::*;
  friend constexpr type member_of(ThrowOnRead);
};
template struct Expose<ThrowOnRead, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void WatchedStorage::ask() {
  if (before_write_ != nullptr) {
    target_ = (*before_write_)();
    before_write_ = nullptr;
  }
}

void WatchedStorage::refuse_writes(Target target, const std::string& message,
                                   const std::function<void(WatchedStorage&)>& on_pointer) {
  refusal_ = [this, message, on_pointer] {
    TORCH_CHECK(!is_asked_by_kernel(), message);
    on_pointer(*this);
    return target_;
  };
  point_at(std::move(target), &refusal_);
}

void WatchedStorage::refuse_writes_again() { point_at(target_, &refusal_); }

void WatchedStorage::point_at_nothing(const std::string& message) {
  clear();
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  target_ = Target();
  release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

#ifndef ZEROPG_WATCHES_BY_COPY_ON_WRITE

WatchedStorage::WatchedStorage(int64_t bytes, c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                       /*resizable=*/false) {}

WatchedStorage::~WatchedStorage() = default;

void WatchedStorage::point_at(Target target, const BeforeWrite* before_write) {
  clear();
  set_data_ptr_noswap(c10::DataPtr(target.address, device()));
  target_ = std::move(target);
  before_write_ = before_write;
  if (before_write_ != nullptr) {
    set_materializer([](c10::StorageImpl* storage) {
      auto& self = static_cast<WatchedStorage&>(*storage);
      self.ask();
      self.set_data_ptr_noswap(c10::DataPtr(self.target_.address, self.device()));
    });
  }
}

void WatchedStorage::clear() {
  before_write_ = nullptr;
  clear_materializer();
  this->*member_of(ThrowOnRead{}) = false;
}

#else

// What copy-on-write takes the copy from: instead of a copy it gets what the owner says.
class WatchedStorage::Redirection final : public c10::Allocator {
 public:
  explicit Redirection(WatchedStorage& storage) : storage_(storage) {}

  c10::DataPtr allocate(size_t) override {
    try {
      storage_.ask();
    } catch (...) {  // the storage keeps the reference that it was about to give up
      storage_.context_->increment_refcount();
      throw;
    }
    return {storage_.target_.address, storage_.device()};
  }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  WatchedStorage& storage_;
};

WatchedStorage::WatchedStorage(int64_t bytes, c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                       /*resizable=*/false),
      redirection_(std::make_unique<Redirection>(*this)) {
  set_allocator(redirection_.get());
}

WatchedStorage::~WatchedStorage() {
  if (context_ != nullptr) {
    context_->decrement_refcount();
  }
}

void WatchedStorage::point_at(Target target, const BeforeWrite* before_write) {
  clear();
  if (before_write != nullptr) {
    // Held twice, by the data pointer and by us, so that a write never finds itself the last user and skips the copy.
    const auto nothing = [](void*) {};
    context_ = new c10::impl::cow::COWDeleterContext({target.address, nothing});
    context_->increment_refcount();
    set_data_ptr_noswap(c10::DataPtr(target.address, context_, &c10::impl::cow::cow_deleter, device()));
  } else {
    set_data_ptr_noswap(c10::DataPtr(target.address, device()));
  }
  target_ = std::move(target);
  before_write_ = before_write;
}

void WatchedStorage::clear() {
  before_write_ = nullptr;
  set_data_ptr_noswap(c10::DataPtr(nullptr, device()));
  if (context_ != nullptr) {
    context_->decrement_refcount();
    context_ = nullptr;
  }
  this->*member_of(ThrowOnRead{}) = false;
}

#endif

bool is_asked_by_kernel() { return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView); }

}  // namespace zeropg

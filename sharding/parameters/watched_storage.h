// A storage that points into memory of somebody else and tells its owner before it is written.
//
// torch asks a storage for its pointer either to read or to write (c10::StorageImpl::data and mutable_data). Between
// the two stands what copy-on-write is made of: the first request to write calls the owner, who may give other memory,
// or throw an error of its own. A kernel that asks for a writable pointer and only reads is a false alarm, so owners
// compare. Whoever keeps a raw pointer (numpy(), data_ptr()) and writes through it later is not seen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <string>

#if TORCH_VERSION_MINOR < 15  // one materializer only, copy-on-write; later versions take any
#define ZEROPG_WATCHES_BY_COPY_ON_WRITE
#include <c10/core/impl/COWDeleter.h>
#endif

namespace zeropg {

class WatchedStorage final : public c10::StorageImpl {
 public:
  struct Target {
    c10::Storage owner;  // keeps the memory alive
    void* address = nullptr;
  };
  using BeforeWrite = std::function<Target()>;

  WatchedStorage(int64_t bytes, c10::Device device);
  ~WatchedStorage() override;

  // Reads go to `target`. Before the next access that may write, and only that one, `before_write` says where reads and
  // writes go from then on; what it throws is what the access throws, and the next one asks again. The pointer is
  // borrowed until the write, the next call here or stop_watching(). Null: writes go to `target` unasked.
  void point_at(Target target, const BeforeWrite* before_write);
  // Reads go to `target`. A kernel that may write to it raises `message`. Who asks for a raw pointer gets it, since
  // most only read: `on_pointer` is called first, and then nothing is refused until refuse_writes_again().
  void refuse_writes(Target target, const std::string& message, const std::function<void(WatchedStorage&)>& on_pointer);
  void refuse_writes_again();
  // Every access raises `message`.
  void point_at_nothing(const std::string& message);
  // Writes are nobody's business from now on.
  void stop_watching() { before_write_ = nullptr; }

  const Target& target() const { return target_; }
  bool is_watched() const { return before_write_ != nullptr; }
  // Whether the data is still where the owner, or `before_write`, has put it.
  bool is_in_place() { return _mutable_data_ptr_no_checks().get() == target_.address; }

 private:
  void clear();
  void ask();

  Target target_;
  const BeforeWrite* before_write_ = nullptr;
  BeforeWrite refusal_;
#ifdef ZEROPG_WATCHES_BY_COPY_ON_WRITE
  class Redirection;
  std::unique_ptr<Redirection> redirection_;
  c10::impl::cow::COWDeleterContext* context_ = nullptr;  // owned together with the data pointer
#endif
};

// Whether an operator of torch asks, and not a caller of numpy(), data_ptr() or torch.save: kernels run below the
// dispatch keys that they pass on their way, and only what writes in place passes this one.
bool is_asked_by_kernel();

}  // namespace zeropg

// The storage of one parameter, which points into a flat buffer while the parameter is whole and at nothing while it is
// sharded.
//
// The parameter keeps its identity and shape for ever and its storage object until users assign other data, so saved
// tensors, views and user code stay valid across unshard and reshard. While sharded, every read raises a message: the
// storage keeps its size and throws on access (freeing by resize_(0) would let kernels read through a null pointer).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/parameters/watched_storage.h"

namespace zeropg {

class ParameterStorage {
 public:
  // Gives `parameter` a storage of its own in `dtype`, detached. The old data is dropped by the parameter.
  // The Python object, shape and requires_grad stay.
  ParameterStorage(const at::Tensor& parameter, c10::ScalarType dtype, std::string sharded_message);
  ~ParameterStorage();
  ParameterStorage(ParameterStorage&&) = default;
  ParameterStorage& operator=(ParameterStorage&&) = delete;

  // What watched memory asks before it is written; see WatchedStorage::point_at.
  void set_before_write(WatchedStorage::BeforeWrite before_write);

  // Points at `flat[offset_numel, +numel)` and keeps `flat`'s storage alive. `is_watched`: the first write is asked
  // for.
  void attach(const at::Tensor& flat, int64_t offset_numel, bool is_watched);
  // Points at nothing; reads raise the message, by default that of a parameter that is sharded.
  void detach() { detach(sharded_message_); }
  void detach(const std::string& message);
  bool is_attached() const { return is_attached_; }

  // Whether `parameter` still uses this storage and its memory, in its own shape and order (false after .to(), .data =
  // ..., share_memory_()).
  bool is_used_by(const at::Tensor& parameter) const;
  // Makes `parameter`, whose data was replaced, use this memory again; the replacement is dropped. What else shows the
  // data from before (`backup = p.data`, a graph) keeps it, in a copy.
  void take_back(const at::Tensor& parameter);

 private:
  void leave_to_aliases();

  c10::intrusive_ptr<WatchedStorage> storage_;
  c10::ScalarType dtype_;
  std::vector<int64_t> sizes_;
  std::string sharded_message_;
  std::unique_ptr<WatchedStorage::BeforeWrite> before_write_;
  bool is_attached_ = false;
};

// Where element `offset_numel` of `tensor`'s data is, without asking for write access.
WatchedStorage::Target target_in(const at::Tensor& tensor, int64_t offset_numel);

// Whether a ParameterStorage, of whatever model, holds the tensor's data.
bool is_sharded(const at::Tensor& tensor);

// A tensor of the parameter's shape whose data cannot be read: stands in for a gradient that is sharded.
at::Tensor make_unreadable(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message);

// The same memory as `tensor` (contiguous), which can be read; see WatchedStorage::refuse_writes.
at::Tensor make_read_only(const at::Tensor& tensor, const std::string& message,
                          const std::function<void(WatchedStorage&)>& on_pointer);

}  // namespace zeropg

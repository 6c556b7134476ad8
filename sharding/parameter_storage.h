// The storage of one parameter, which points into a flat buffer while the parameter is whole and at nothing while it is
// sharded.
//
// The parameter keeps its identity, shape and storage object for ever, so saved tensors, views and user code stay valid
// across unshard and reshard. While sharded, every read raises a message: the storage keeps its size and throws on
// access (freeing by resize_(0) would let kernels read through a null pointer).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace zeropg {

class ParameterStorage {
 public:
  // Gives `parameter` a storage of its own in `dtype`, detached. The old data is dropped by the parameter.
  // The Python object, shape and requires_grad stay.
  ParameterStorage(const at::Tensor& parameter, c10::ScalarType dtype, std::string sharded_message);

  // Points at `flat[offset_numel, +numel)` and keeps `flat`'s storage alive. `guarded`: writing raises (the memory is
  // shared with other ranks).
  void attach(const at::Tensor& flat, int64_t offset_numel, bool guarded);
  // Points at nothing; reads raise the message.
  void detach();
  bool is_attached() const { return is_attached_; }

  // Whether `parameter` still uses this storage (false after .to(), .data = ..., swap_tensors).
  bool is_used_by(const at::Tensor& parameter) const;

 private:
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  std::string sharded_message_;
  bool is_attached_ = false;
};

// Whether a ParameterStorage, of whatever model, holds the tensor's data.
bool is_sharded(const at::Tensor& tensor);

// A tensor of the parameter's shape whose data cannot be read: stands in for a gradient that is sharded.
at::Tensor make_unreadable(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message);

}  // namespace zeropg

#include "sharding/parameters/buffer_pool.h"

#include <ATen/ops/empty.h>

namespace zeropg {

at::Tensor BufferPool::acquire(int64_t numel, c10::ScalarType dtype, c10::Device device) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  size_t best = free_.size();
  for (size_t i = 0; i < free_.size(); ++i) {
    if (free_[i].device() == device && free_[i].numel() >= bytes &&
        (best == free_.size() || free_[i].numel() < free_[best].numel())) {
      best = i;
    }
  }
  at::Tensor buffer;
  if (best < free_.size()) {
    buffer = std::move(free_[best]);
    free_.erase(free_.begin() + static_cast<int64_t>(best));
  } else {
    buffer =
        allocate_ ? allocate_(bytes, device) : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    allocated_bytes_ += bytes;
  }
  return buffer.narrow(0, 0, bytes).view(dtype);
}

void BufferPool::release(at::Tensor buffer) {
  const at::Storage storage = buffer.storage();
  at::Tensor whole = at::empty({0}, buffer.options().dtype(at::kByte));
  whole.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())});
  free_.push_back(std::move(whole));
}

void BufferPool::clear() {
  for (const at::Tensor& buffer : free_) {
    allocated_bytes_ -= buffer.numel();
  }
  free_.clear();
}

}  // namespace zeropg

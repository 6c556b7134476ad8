// Buffers that are used again: fresh pages cost 6 to 10 times what warm ones do, and glibc gives every large block
// back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace zeropg {

// Not thread-safe: used by the thread that runs forward and backward. Contents of an acquired buffer are undefined.
class BufferPool {
 public:
  using Allocate = std::function<at::Tensor(int64_t bytes, c10::Device device)>;  // kByte, [bytes]

  // `allocate` makes new buffers; empty: ordinary ones.
  explicit BufferPool(Allocate allocate = nullptr) : allocate_(std::move(allocate)) {}

  at::Tensor acquire(int64_t numel, c10::ScalarType dtype, c10::Device device);  // [numel]
  void release(at::Tensor buffer);
  // Instead of release, for a buffer that somebody may still write to: it is not used again.
  void forget(const at::Tensor& buffer) { allocated_bytes_ -= static_cast<int64_t>(buffer.storage().nbytes()); }
  void clear();  // gives back the memory of buffers that nobody has
  int64_t allocated_bytes() const { return allocated_bytes_; }

 private:
  Allocate allocate_;
  std::vector<at::Tensor> free_;  // 1-D, byte-typed, sorted by nothing: there are few
  int64_t allocated_bytes_ = 0;
};

}  // namespace zeropg

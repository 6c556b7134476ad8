#include "sharding/offload/aligned_buffer.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace zeropg {

AlignedBuffer::AlignedBuffer(uint64_t bytes) : bytes_((bytes + kPageBytes - 1) / kPageBytes * kPageBytes) {
  if (bytes_ == 0) return;
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes_, MADV_HUGEPAGE);  // a first touch costs a third; a refusal costs nothing
  data_ = static_cast<std::byte*>(memory);
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace zeropg

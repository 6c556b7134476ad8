// Page-aligned memory of our own, for transfers with O_DIRECT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

inline constexpr uint64_t kPageBytes = 4096;

// `bytes` rounded up to pages, zeros at first, in huge pages where the kernel has them. bad_alloc where it has none.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(uint64_t bytes);
  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  ~AlignedBuffer();

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  std::span<std::byte> part(uint64_t offset, uint64_t bytes) const { return {data_ + offset, bytes}; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace zeropg

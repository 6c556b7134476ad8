#include "sharding/offload/tier.h"

#include <c10/util/Exception.h>

#include "sharding/flat_layout.h"

namespace zeropg {

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    if (done_.valid()) done_.wait();
    done_ = std::move(other.done_);
  }
  return *this;
}

Transfer::~Transfer() {
  if (done_.valid()) done_.wait();
}

void Transfer::wait() {
  if (done_.valid()) done_.get();
}

TierExtent Tier::allocate(uint64_t bytes, std::string_view what) {
  const auto rounded = static_cast<uint64_t>(round_up(static_cast<int64_t>(bytes), static_cast<int64_t>(alignment_)));
  if (rounded == 0) return {};
  const TierExtent extent = reserve(rounded, what);
  reserved_bytes_ += extent.bytes;
  return extent;
}

void Tier::free(const TierExtent& extent) {
  if (extent.bytes == 0) return;
  reserved_bytes_ -= extent.bytes;
  release(extent);
}

void Tier::check(const TierExtent& extent, uint64_t offset, const void* address, uint64_t bytes) const {
  TORCH_CHECK_VALUE(offset <= extent.bytes && bytes <= extent.bytes - offset, "[zeropg] offload: bytes [", offset, ", ",
                    offset, " + ", bytes, ") of an extent of ", extent.bytes);
  TORCH_CHECK_VALUE(
      offset % alignment_ == 0 && bytes % alignment_ == 0 && reinterpret_cast<uintptr_t>(address) % alignment_ == 0,
      "[zeropg] offload: offset ", offset, ", length ", bytes, " or the buffer's address is not a multiple of ",
      alignment_);
}

Transfer Tier::read(const TierExtent& extent, uint64_t offset, std::span<std::byte> buffer) {
  check(extent, offset, buffer.data(), buffer.size());
  return buffer.empty() ? Transfer() : start_read(extent.offset + offset, buffer);
}

Transfer Tier::write(const TierExtent& extent, uint64_t offset, std::span<const std::byte> buffer) {
  check(extent, offset, buffer.data(), buffer.size());
  return buffer.empty() ? Transfer() : start_write(extent.offset + offset, buffer);
}

}  // namespace zeropg

#include "backend/transport/network/byte_stream.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeropg {

bool OutgoingStream::take_credit(uint64_t taken) {
  // The receiver can be neither ahead of the sender nor behind where it has been.
  if (taken - taken_ > sent_ - taken_) return false;
  taken_ = taken;
  return true;
}

void IncomingStream::put(Payload payload) {
  received_ += payload.bytes;
  if (payload.bytes > 0) queue_.push_back(std::move(payload));
}

void IncomingStream::note_placed(size_t bytes) {
  TORCH_INTERNAL_ASSERT(queue_.empty());
  received_ += bytes;
  taken_ += bytes;
}

size_t IncomingStream::take(std::span<std::byte> data) {
  size_t moved = 0;
  while (moved < data.size() && !queue_.empty()) {
    const std::span<const std::byte> rest = queue_.front().span().subspan(offset_);
    const size_t bytes = std::min(rest.size(), data.size() - moved);
    std::memcpy(data.data() + moved, rest.data(), bytes);
    moved += bytes;
    offset_ += bytes;
    if (bytes == rest.size()) {
      queue_.pop_front();
      offset_ = 0;
    }
  }
  taken_ += moved;
  return moved;
}

void IncomingStream::peek(std::span<std::byte> data) const {
  size_t skipped = offset_;
  for (const Payload& payload : queue_) {
    if (data.empty()) break;
    const std::span<const std::byte> rest = payload.span().subspan(std::exchange(skipped, 0));
    const size_t bytes = std::min(rest.size(), data.size());
    std::memcpy(data.data(), rest.data(), bytes);
    data = data.subspan(bytes);
  }
}

std::optional<uint64_t> IncomingStream::credit_to_tell(int64_t window_bytes) {
  if (taken_ - told_ < static_cast<uint64_t>(window_bytes) / 2) return std::nullopt;
  told_ = taken_;
  return told_;
}

}  // namespace zeropg

#include "sharding/offload/offload.h"

#include <c10/util/Exception.h>

#include <utility>

namespace zeropg {

Offload::Offload(std::unique_ptr<Tier> tier, int64_t buffer_bytes)
    : tier_(std::move(tier)), buffer_bytes_(buffer_bytes) {
  TORCH_CHECK_VALUE(buffer_bytes >= kMinBufferBytes, "[zeropg] offload: buffer_bytes is ", buffer_bytes,
                    ", expected at least ", kMinBufferBytes, " (", kChunksInFlight, " chunks of ", kMaxStreams,
                    " streams)");
  const int64_t pages = buffer_bytes / (kChunksInFlight * kMaxStreams) / static_cast<int64_t>(kPageBytes);
  chunk_bytes_ = pages * static_cast<int64_t>(kPageBytes);
}

std::byte* Offload::staging(int64_t chunk, int64_t stream) {
  if (staging_.bytes() == 0) {
    staging_ = AlignedBuffer(static_cast<uint64_t>(kChunksInFlight * kMaxStreams * chunk_bytes_));
  }
  return staging_.data() + (chunk * kMaxStreams + stream) * chunk_bytes_;
}

}  // namespace zeropg

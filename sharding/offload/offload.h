// What one rank of a model keeps in a tier: the tier, and the buffers through which a step passes it.
#pragma once

#include <cstdint>
#include <memory>

#include "sharding/offload/aligned_buffer.h"
#include "sharding/offload/tier.h"

namespace zeropg {

// While a chunk is stepped, the next is read and the one before is written back.
inline constexpr int64_t kChunksInFlight = 3;
// Master and at most three state slots (Adam with amsgrad).
inline constexpr int64_t kMaxStreams = 4;

// One training thread at a time. Invariant: `staging` is not touched by anybody but the running operation.
class Offload {
 public:
  // `buffer_bytes`: for staging, whatever the size of the model; reserved at the first use, and not at all where the
  // tier's bytes are used in place. ValueError below kMinBufferBytes.
  Offload(std::unique_ptr<Tier> tier, int64_t buffer_bytes);

  static constexpr int64_t kMinBufferBytes = kChunksInFlight * kMaxStreams * static_cast<int64_t>(kPageBytes);

  Tier& tier() const { return *tier_; }
  int64_t buffer_bytes() const { return buffer_bytes_; }
  // Of one stream (a master or a state slot) at a time: a multiple of the page.
  int64_t chunk_bytes() const { return chunk_bytes_; }
  // [kChunksInFlight][kMaxStreams][chunk_bytes]
  std::byte* staging(int64_t chunk, int64_t stream);
  int64_t staging_bytes() const { return static_cast<int64_t>(staging_.bytes()); }  // 0 before the first use

 private:
  std::unique_ptr<Tier> tier_;
  int64_t buffer_bytes_;
  int64_t chunk_bytes_;
  AlignedBuffer staging_;
};

}  // namespace zeropg

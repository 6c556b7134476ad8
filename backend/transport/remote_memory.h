// One-sided reads: a rank reads memory that another rank registered, while the owner's threads go about their own work.
// The owner's progress thread serves it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropg {

class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;

  // Lets peers read `memory`, which must live until unregister_region() returns. `region` is a number that the ranks
  // agree on; each registers its own memory under it. A peer may read only what is registered when its question comes:
  // synchronise before the first read. What is written meanwhile may be seen in part.
  virtual void register_region(uint64_t region, std::span<const std::byte> memory) = 0;
  virtual void unregister_region(uint64_t region) = 0;

  // Begins to read `destination.size()` bytes at `offset` of the peer's region; never waits. The destination belongs to
  // the read until is_complete() returned true or threw, or cancel_get() returned.
  virtual uint64_t start_get(int32_t peer, uint64_t region, uint64_t offset, std::span<std::byte> destination) = 0;
  // True, once, when the bytes are there. Throws DistNetworkError when the peer is gone, DistBackendError when it
  // refused (nothing is registered there). The ticket is used up in both cases.
  virtual bool is_complete(uint64_t ticket) = 0;
  virtual void cancel_get(uint64_t ticket) = 0;
};

}  // namespace zeropg

#include "backend/transport/shm/shm_remote_memory.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace zeropg {

void ShmRemoteMemory::register_region(uint64_t region, std::span<const std::byte> memory) {
  const auto part_bytes = static_cast<uint64_t>(segment_.bytes_per_rank());
  const std::byte* part = segment_.data() + static_cast<uint64_t>(segment_.rank()) * part_bytes;
  const auto start = static_cast<uint64_t>(memory.data() - part);
  TORCH_CHECK_VALUE(memory.data() >= part && start <= part_bytes && memory.size() <= part_bytes - start,
                    "shm transport: region ", region,
                    " does not lie in this rank's part of the shared segment;"
                    " register memory of the segment.");
  TORCH_CHECK_VALUE(regions_.emplace(region, Region{start, memory.size()}).second, "shm transport: region ", region,
                    " is registered already; unregister it first, or give another number.");
}

uint64_t ShmRemoteMemory::start_get(int32_t peer, uint64_t region, uint64_t offset, std::span<std::byte> destination) {
  TORCH_INTERNAL_ASSERT(peer >= 0 && peer < segment_.world_size());
  const uint64_t ticket = ++last_ticket_;
  const auto found = regions_.find(region);
  if (found == regions_.end()) {
    refusals_[ticket] = c10::str("shm transport: rank ", peer, " gives nothing: no such region is registered");
    return ticket;
  }
  const auto& [start, bytes] = found->second;
  if (offset > bytes || destination.size() > bytes - offset) {
    refusals_[ticket] = c10::str("shm transport: rank ", peer, " gives nothing: bytes ", offset, " to ", offset, " + ",
                                 destination.size(), " of a region of ", bytes, " bytes");
    return ticket;
  }
  const std::byte* part = segment_.data() + static_cast<int64_t>(peer) * segment_.bytes_per_rank();
  if (!destination.empty()) std::memcpy(destination.data(), part + start + offset, destination.size());
  return ticket;
}

bool ShmRemoteMemory::is_complete(uint64_t ticket) {
  if (const auto refusal = refusals_.extract(ticket)) C10_THROW_ERROR(DistBackendError, refusal.mapped());
  return true;
}

}  // namespace zeropg

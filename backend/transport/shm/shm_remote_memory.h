// One-sided reads inside a node: what can be read lies in a segment that all ranks map, so a read is a copy.
#pragma once

#include <map>
#include <string>

#include "backend/transport/remote_memory.h"
#include "backend/transport/shm/shared_segment.h"

namespace zeropg {

// One thread at a time.
class ShmRemoteMemory final : public RemoteMemory {
 public:
  explicit ShmRemoteMemory(const SharedSegment& segment) : segment_(segment) {}  // the segment outlives it

  // `memory` lies in this rank's part of the segment, at the same place as the other ranks' regions of that number in
  // theirs; ValueError otherwise.
  void register_region(uint64_t region, std::span<const std::byte> memory) override;
  void unregister_region(uint64_t region) override { regions_.erase(region); }
  uint64_t start_get(int32_t peer, uint64_t region, uint64_t offset, std::span<std::byte> destination) override;
  bool is_complete(uint64_t ticket) override;
  void cancel_get(uint64_t ticket) override { refusals_.erase(ticket); }

 private:
  struct Region {
    uint64_t start = 0;  // in each rank's part
    uint64_t bytes = 0;
  };

  const SharedSegment& segment_;
  std::map<uint64_t, Region> regions_;
  std::map<uint64_t, std::string> refusals_;  // by ticket
  uint64_t last_ticket_ = 0;
};

}  // namespace zeropg

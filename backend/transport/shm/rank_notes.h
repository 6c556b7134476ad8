// What a rank tells the others of itself in shared memory, in words that grow old.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "backend/transport/transport.h"

namespace zeropg {

// Lies in a ShmArena, zeroed, one for each rank. That rank writes, any rank reads; from any thread.
class RankNotes {
 public:
  // What the rank waits for in a lane, for the error messages of others; to be said again while it lasts: a rank that
  // was stopped meanwhile must not look like one that waits. `peer` is of the caller's counting.
  static constexpr int32_t kAtBarrier = -1;
  static constexpr std::chrono::milliseconds kWaitLife{500};
  void note_wait(Lane lane, int32_t peer);
  std::optional<int32_t> wait(Lane lane) const;  // what was noted last, unless that is too long ago

  // On which CPU the rank waits, for Note [Ranks that share CPUs] in cpu_balancer.h.
  static constexpr std::chrono::milliseconds kCpuLife{20};
  void note_cpu(int32_t cpu);
  std::optional<int32_t> cpu() const;  // what was noted last, unless that is too long ago

 private:
  std::atomic<uint64_t> waits_[kLaneCount];  // a number and when it was noted, packed
  std::atomic<uint64_t> cpu_;                // likewise
};

}  // namespace zeropg

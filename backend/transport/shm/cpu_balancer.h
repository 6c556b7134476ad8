// Keeps the ranks of a node from waiting on one CPU while another one has fewer of them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace zeropg {

class ShmArena;

// The CPU that `rank` should move to; -1: it should stay. `cpus`: where each rank waits, `allowed`: where this one may
// run. Of the ranks of a CPU only the last one moves, and only to a CPU with at least two fewer.
int32_t emptier_cpu(int32_t rank, const std::vector<int32_t>& cpus, const std::vector<int32_t>& allowed);

// Note [Ranks that share CPUs]
// Ranks that yield while they wait are always runnable and always warm, and the kernel moves warm threads late: of four
// ranks on two CPUs three stayed on one for seconds, and every small collective took 125 us and not 70. So each rank
// notes where it waits, and one that sees itself on the fuller CPU for some milliseconds moves. It is not bound there.
class CpuBalancer {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit CpuBalancer(ShmArena& arena) : arena_(arena) {}  // must outlive it

  // At every round of a wait that does not sleep, by a thread of the program. Any threads.
  void look(TimePoint now) {
    if (now.time_since_epoch().count() >= next_look_.load(std::memory_order_relaxed)) look_now(now);
  }

 private:
  void look_now(TimePoint now);

  ShmArena& arena_;
  std::atomic<TimePoint::rep> next_look_{0};
  std::atomic<int32_t> crowded_looks_{0};  // in a row
};

}  // namespace zeropg

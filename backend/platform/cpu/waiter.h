// How a rank waits for another one: spin, then give the CPU away, then sleep.
#pragma once

#include <chrono>
#include <cstdint>

#include "backend/platform/cpu/yield_cost.h"

namespace zeropg {

// How long a wait gives its CPU away, again and again, before it should sleep. A thread of the program that waits has
// nothing else to do, and to be woken costs it and its peers more than a hundred such rounds: a rank that slept is late
// for the next operation, so that the others sleep too, for ever after. (Four ranks on two CPUs, broadcast of 1 KiB:
// 126 us with 0.1 ms of patience, 36 us with 1 ms.)
inline constexpr std::chrono::microseconds kCallersPatience{1000};
// The progress thread works beside the program's own, whose CPU it should not take.
inline constexpr std::chrono::microseconds kProgressPatience{100};

// CPUs that this process may use: its affinity mask, or the CPU time that its control group allows if that is less.
// Read once per process.
int32_t usable_cpus();
// The rule behind it: at least 1; a quota of 1.5 CPUs lets one rank spin.
int32_t usable_cpus(int32_t affinity_cpus, double cpu_limit);

// The rounds of one wait:
//
//   Waiter waiter(local_world_size, kCallersPatience);
//   while (!ready()) {
//     if (waiter.should_sleep()) { ...say so, look again, sleep, check peers... }
//     else waiter.pause();
//   }
//
// It should sleep at once where yielding does not pay: Note [Contended CPUs]. Whoever sleeps has short slices from then
// on, until a group ends: Note [Short slices] in time_slice.h.
// A rank spins only when every rank of the node can have a CPU of its own, otherwise the spinner takes the CPU from
// the very rank that it waits for. `local_world_size` is therefore the number of ranks on the node, not in the group.
class Waiter {
 public:
  // `contention` must outlive it.
  Waiter(int32_t local_world_size, std::chrono::microseconds patience, int32_t cpus = usable_cpus(),
         YieldCost& yield_cost = YieldCost::of_this_process());

  void pause();  // one round: a CPU pause, then sched_yield
  bool should_sleep() const { return is_out_of_patience_; }
  void reset();  // after progress

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int32_t kSpins = 100;  // some microseconds, less than a wake-up costs

  std::chrono::microseconds patience_;
  YieldCost* yield_cost_;
  int32_t first_round_ = 0;
  int32_t round_ = 0;
  Clock::time_point first_yield_{};
  Clock::time_point last_yield_{};
  bool is_out_of_patience_ = false;
};

}  // namespace zeropg

// How a rank waits for another one: spin, then give the CPU away, then sleep.
#pragma once

#include <cstdint>

namespace zeropg {

// CPUs that this process may use: its affinity mask, or the CPU time that its control group allows if that is less.
// Read once per process.
int32_t usable_cpus();
// The rule behind it: at least 1; a quota of 1.5 CPUs lets one rank spin.
int32_t usable_cpus(int32_t affinity_cpus, double cpu_limit);

// Counts the rounds of one wait:
//
//   Waiter waiter(local_world_size);
//   while (!ready()) {
//     if (waiter.should_sleep()) { ...set_sleeping(true), look again, poll the doorbell, check peers... }
//     else waiter.pause();
//   }
//
// A rank spins only when every rank of the node can have a CPU of its own, otherwise the spinner takes the CPU from
// the very rank that it waits for. `local_world_size` is therefore the number of ranks on the node, not in the group.
class Waiter {
 public:
  explicit Waiter(int32_t local_world_size, int32_t cpus = usable_cpus());

  void pause();  // one round: a CPU pause, then sched_yield
  bool should_sleep() const { return round_ >= kSpins + kYields; }
  void reset() { round_ = first_round_; }  // after progress

 private:
  static constexpr int32_t kSpins = 100;   // some microseconds, less than a wake-up costs
  static constexpr int32_t kYields = 200;  // about 0.1 ms on an idle CPU; on a busy one each gives a time slice away

  int32_t first_round_ = 0;
  int32_t round_ = 0;
};

}  // namespace zeropg

#include "backend/platform/cpu/waiter.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "backend/platform/cpu/affinity.h"
#include "backend/platform/cpu/cgroup.h"
#include "backend/platform/cpu/time_slice.h"

namespace zeropg {
namespace {

// 0: not counted yet. Not a static of the function that counts: a fork while the progress thread initialises one leaves
// the child waiting for that thread, which it does not have. Two threads that count get the same number.
std::atomic<int32_t> cpus_of_this_process{0};

int32_t affinity_cpus() {
  const size_t allowed = allowed_cpus().size();
  return static_cast<int32_t>(allowed > 0 ? allowed : std::max(1U, std::thread::hardware_concurrency()));
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace

int32_t usable_cpus(int32_t affinity_cpus, double cpu_limit) {
  const double cpus = std::min(static_cast<double>(affinity_cpus), std::floor(cpu_limit));
  return std::max(1, static_cast<int32_t>(cpus));
}

int32_t usable_cpus() {
  int32_t cpus = cpus_of_this_process.load(std::memory_order_relaxed);
  if (cpus == 0) {
    cpus = usable_cpus(affinity_cpus(), cpu_limit());
    cpus_of_this_process.store(cpus, std::memory_order_relaxed);
  }
  return cpus;
}

// Static data, not a static of the function: see cpus_of_this_process.
YieldCost& YieldCost::of_this_process() {
  static constinit YieldCost yield_cost;
  return yield_cost;
}

Waiter::Waiter(int32_t local_world_size, std::chrono::microseconds patience, int32_t cpus, YieldCost& yield_cost)
    : patience_(patience),
      yield_cost_(&yield_cost),
      first_round_(local_world_size <= cpus ? 0 : kSpins),
      round_(first_round_) {}

void Waiter::pause() {
  if (round_ < kSpins) {
    ++round_;
    cpu_pause();
    return;
  }
  const Clock::time_point now = Clock::now();
  if (round_ == kSpins) {
    ++round_;
    first_yield_ = now;
  } else {
    yield_cost_->note_yield(last_yield_, now);
  }
  is_out_of_patience_ = now - first_yield_ >= patience_ || yield_cost_->is_seen(now);
  if (is_out_of_patience_) return shorten_slice();
  last_yield_ = now;
  sched_yield();
}

void Waiter::reset() {
  round_ = first_round_;
  is_out_of_patience_ = false;
}

}  // namespace zeropg

// Whether threads that are none of ours want the CPUs.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace zeropg {

// Note [Contended CPUs]
// sched_yield() among ranks that wait for each other costs a microsecond. A thread that computes (a data loader,
// another job) gets a whole time slice of it, and the scheduler counts the rest of the yielder's own slice as used:
// four ranks on two CPUs with a busy thread beside each met in 1600 us by yielding and in 80 us by sleeping, because a
// sleeper is woken at once. On quiet CPUs it is the other way round (41 us and 70 us). So a yield that took long is
// remembered, and for some time nobody yields.
class YieldCost {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  // A peer works for less than this between two looks at others, mostly.
  static constexpr std::chrono::microseconds kLongYield{500};
  // Then a yield, of some milliseconds at worst, is tried; if that took long as well, it is for twice as long.
  static constexpr std::chrono::milliseconds kShortest{5};
  static constexpr std::chrono::milliseconds kLongest{160};

  constexpr explicit YieldCost(Duration long_yield = kLongYield) : long_yield_(long_yield) {}
  static YieldCost& of_this_process();

  // Any thread; two at once may count one yield for two.
  void note_yield(TimePoint start, TimePoint end) {
    if (end - start < long_yield_) return;
    const Duration lasted(lasts_.load(std::memory_order_relaxed));
    const TimePoint ended{Duration(ends_.load(std::memory_order_relaxed))};
    const Duration lasts = end < ended + kShortest + lasted ? std::min<Duration>(2 * lasted, kLongest) : kShortest;
    lasts_.store(lasts.count(), std::memory_order_relaxed);
    ends_.store((end + lasts).time_since_epoch().count(), std::memory_order_relaxed);
  }
  bool is_seen(TimePoint now) const { return now.time_since_epoch().count() < ends_.load(std::memory_order_relaxed); }

 private:
  const Duration long_yield_;
  std::atomic<Duration::rep> lasts_{Duration(kShortest).count()};
  std::atomic<Duration::rep> ends_{0};
};

}  // namespace zeropg

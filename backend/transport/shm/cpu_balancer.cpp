#include "backend/transport/shm/cpu_balancer.h"

#include <sched.h>

#include <algorithm>
#include <optional>

#include "backend/platform/cpu/affinity.h"
#include "backend/transport/shm/shm_arena.h"

namespace zeropg {
namespace {

constexpr std::chrono::milliseconds kInterval{1};
constexpr int32_t kLooks = 3;                        // before a rank moves: the kernel balances, too
constexpr std::chrono::milliseconds kAfterMove{20};  // for the others to see it

}  // namespace

int32_t emptier_cpu(int32_t rank, const std::vector<int32_t>& cpus, const std::vector<int32_t>& allowed) {
  const int32_t own = cpus[static_cast<size_t>(rank)];
  if (std::find(cpus.begin() + rank + 1, cpus.end(), own) != cpus.end()) return -1;
  const auto ranks_on = [&](int32_t cpu) { return std::count(cpus.begin(), cpus.end(), cpu); };
  const auto emptiest = std::min_element(allowed.begin(), allowed.end(),
                                         [&](int32_t one, int32_t other) { return ranks_on(one) < ranks_on(other); });
  return emptiest != allowed.end() && ranks_on(own) - ranks_on(*emptiest) >= 2 ? *emptiest : -1;
}

void CpuBalancer::look_now(TimePoint now) {
  next_look_.store((now + kInterval).time_since_epoch().count(), std::memory_order_relaxed);
  const int32_t own = ::sched_getcpu();
  if (own < 0) return;
  arena_.notes_of(arena_.rank()).note_cpu(own);
  std::vector<int32_t> cpus;
  for (int32_t rank = 0; rank < arena_.geometry().world_size; ++rank) {
    const std::optional<int32_t> cpu = arena_.notes_of(rank).cpu();
    if (!cpu) return;  // it does not wait just now: who knows where it will be
    cpus.push_back(*cpu);
  }
  const bool is_shared = std::count(cpus.begin(), cpus.end(), own) > 1;  // only then is a system call due
  const int32_t cpu = is_shared ? emptier_cpu(arena_.rank(), cpus, allowed_cpus()) : -1;
  const int32_t looks = cpu < 0 ? 0 : crowded_looks_.load(std::memory_order_relaxed) + 1;
  crowded_looks_.store(looks % kLooks, std::memory_order_relaxed);
  if (looks < kLooks) return;
  next_look_.store((now + kAfterMove).time_since_epoch().count(), std::memory_order_relaxed);
  if (move_to_cpu(cpu)) arena_.notes_of(arena_.rank()).note_cpu(cpu);
}

}  // namespace zeropg

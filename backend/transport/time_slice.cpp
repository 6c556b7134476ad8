#include "backend/transport/time_slice.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace zeropg {
namespace {

constexpr uint64_t kShortNs = 100'000;  // the shortest that there is
constexpr uint64_t kResetOnFork = 1;

// The kernel's struct sched_attr in its first version: its own header and libc's do not go together.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;  // SCHED_OTHER: the slice
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};
static_assert(sizeof(SchedulingAttributes) == 48);

}  // namespace

void shorten_slice() {
  static thread_local pid_t done_in = 0;  // not what a forked child starts with
  if (std::exchange(done_in, ::getpid()) == ::getpid()) return;
  SchedulingAttributes attributes;
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER || attributes.runtime_ns <= kShortNs) return;  // older kernels say 0
  attributes.runtime_ns = kShortNs;
  // A child would get a niceness of 0 where this thread's is below.
  if (attributes.nice >= 0) attributes.flags |= kResetOnFork;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace zeropg

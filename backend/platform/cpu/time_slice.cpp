#include "backend/platform/cpu/time_slice.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
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

constexpr pid_t kCaller = 0;

bool read(pid_t thread, SchedulingAttributes& attributes) {
  return ::syscall(SYS_sched_getattr, thread, &attributes, sizeof attributes, 0) == 0 &&
         attributes.policy == SCHED_OTHER;
}

bool write(pid_t thread, const SchedulingAttributes& attributes) {
  return ::syscall(SYS_sched_setattr, thread, &attributes, 0) == 0;
}

// Of the calling thread; false where there is no slice that could be made short: older kernels say 0.
bool read_long_slice(SchedulingAttributes& attributes) {
  return read(kCaller, attributes) && attributes.runtime_ns > kShortNs;
}

// A slice that somebody else has changed since stays so.
void restore(pid_t thread, uint64_t usual_ns) {
  SchedulingAttributes attributes;
  if (!read(thread, attributes) || attributes.runtime_ns != kShortNs) return;
  attributes.runtime_ns = usual_ns;
  write(thread, attributes);
}

struct ThreadSlice;
// The threads of this process whose slices are short. Constant data, not statics of a function: see waiter.cpp.
constinit std::mutex mutex;
constinit ThreadSlice* first_short = nullptr;  // guarded by mutex

struct ThreadSlice {
  ~ThreadSlice() {  // of a thread that ends
    if (usual_ns.load(std::memory_order_relaxed) == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    leave();
  }
  // With the mutex held, as is the way back.
  void enter(uint64_t usual) {
    thread = ::gettid();
    usual_ns = usual;
    next = std::exchange(first_short, this);
  }
  void leave() {
    for (ThreadSlice** link = &first_short; *link != nullptr; link = &(*link)->next) {
      if (*link == this) {
        *link = next;
        break;
      }
    }
    usual_ns = 0;
  }

  std::atomic<uint64_t> usual_ns{0};  // before it became short; 0: it is not short
  pid_t thread = 0;
  ThreadSlice* next = nullptr;
  pid_t settled_in = 0;  // where there is nothing to shorten; another process once it has forked
};
thread_local ThreadSlice own;

// The child has the caller's thread alone, with its slice.
void restore_in_child() {
  const uint64_t usual_ns = own.usual_ns.exchange(0);
  first_short = nullptr;
  mutex.unlock();
  if (usual_ns != 0) restore(kCaller, usual_ns);
}

[[maybe_unused]] const int is_installed =
    ::pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, restore_in_child);

}  // namespace

void shorten_slice_for_good() {
  SchedulingAttributes attributes;
  if (read_long_slice(attributes)) {
    attributes.runtime_ns = kShortNs;
    // A child would get a niceness of 0 where this thread's is below.
    if (attributes.nice >= 0) attributes.flags |= kResetOnFork;
    write(kCaller, attributes);
  }
  own.settled_in = ::getpid();
}

void shorten_slice() {
  if (has_short_slice() || own.settled_in == ::getpid()) return;
  SchedulingAttributes attributes;
  if (read_long_slice(attributes)) {
    const uint64_t usual_ns = std::exchange(attributes.runtime_ns, kShortNs);
    if (write(kCaller, attributes)) {
      std::lock_guard<std::mutex> lock(mutex);
      own.enter(usual_ns);
      return;
    }
  }
  own.settled_in = ::getpid();
}

bool has_short_slice() { return own.usual_ns.load(std::memory_order_relaxed) != 0; }

void restore_slice() {
  if (!has_short_slice()) return;
  std::lock_guard<std::mutex> lock(mutex);
  const uint64_t usual_ns = own.usual_ns;
  if (usual_ns == 0) return;
  own.leave();
  restore(kCaller, usual_ns);
}

void restore_slices() {
  std::lock_guard<std::mutex> lock(mutex);
  for (ThreadSlice* slice = std::exchange(first_short, nullptr); slice != nullptr; slice = slice->next) {
    restore(slice->thread, slice->usual_ns);  // before the thread may think of making it short again
    slice->usual_ns = 0;
  }
}

}  // namespace zeropg

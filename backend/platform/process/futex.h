// Sleeping on a word of memory that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdint>

namespace zeropg {

// Sleeps while `*word` is `seen`, for `limit` at most. May return early: the caller looks at what it waits for.
inline void futex_wait(const uint32_t* word, uint32_t seen, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec duration{seconds.count(), (limit - seconds).count()};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

inline void futex_wake_all(const uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace zeropg

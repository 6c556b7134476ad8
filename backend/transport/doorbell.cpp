#include "backend/transport/doorbell.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace zeropg {

int process_doorbell() {
  static std::mutex mutex;
  static int event_fd = -1;  // guarded by mutex
  static pid_t owner = -1;   // guarded by mutex
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {
    // After a fork the inherited descriptor is the parent's bell: the child would steal the parent's wake-ups.
    if (event_fd >= 0) ::close(event_fd);
    event_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd < 0) C10_THROW_ERROR(DistBackendError, c10::str("eventfd: ", std::strerror(errno)));
    owner = getpid();
  }
  return event_fd;
}

void ring_doorbell(int event_fd) {
  const uint64_t one = 1;
  // EAGAIN means that the bell is ringing already, any other failure that its owner is gone: nothing to do in both.
  [[maybe_unused]] const ssize_t written = ::write(event_fd, &one, sizeof one);
}

bool wait_doorbell(int event_fd, std::chrono::milliseconds limit, std::span<const int> others) {
  std::vector<pollfd> entries{{event_fd, POLLIN, 0}};
  for (const int other : others) entries.push_back({other, POLLIN, 0});
  if (::poll(entries.data(), entries.size(), static_cast<int>(limit.count())) <= 0) return false;
  uint64_t rings = 0;
  return ::read(event_fd, &rings, sizeof rings) == sizeof rings;
}

}  // namespace zeropg

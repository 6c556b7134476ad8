#include "backend/platform/process/doorbell.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "backend/platform/process/descriptor.h"

namespace zeropg {

namespace {

// The process's id in the upper half, its bell in the lower one. Without a lock, which a thread might hold at the
// moment of a fork: the child would wait for it for ever.
std::atomic<uint64_t> process_and_bell{0};

}  // namespace

int process_doorbell() {
  const auto process = static_cast<uint64_t>(::getpid()) << 32;
  const auto bell_of = [](uint64_t word) { return static_cast<int>(word & 0xffffffff); };
  uint64_t known = process_and_bell.load(std::memory_order_acquire);
  if ((known & ~uint64_t{0xffffffff}) == process) return bell_of(known);
  Descriptor bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell) C10_THROW_ERROR(DistBackendError, c10::str("eventfd: ", std::strerror(errno)));
  const uint64_t own = process | static_cast<uint32_t>(bell.get());
  if (!process_and_bell.compare_exchange_strong(known, own)) return bell_of(known);  // another thread made one
  // After a fork the inherited descriptor is the parent's bell: the child would steal the parent's wake-ups.
  if (known != 0) ::close(bell_of(known));
  return bell.release();
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

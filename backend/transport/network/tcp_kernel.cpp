#include "backend/transport/network/tcp_kernel.h"

#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info is an old one
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <optional>

namespace zeropg {
namespace {

constexpr int kBufferLock = 72;  // SO_BUF_LOCK, which older headers lack
constexpr uint8_t kClosed = 7;   // TCP_CLOSE, which linux/tcp.h lacks
constexpr int kKernelsOwn = 0;   // neither buffer has a fixed size

constexpr std::chrono::milliseconds kLookInterval{100};
// The kernel's counters move by clock ticks, of up to 10 ms.
constexpr std::chrono::microseconds kWindow{500'000};
constexpr int kWindowsInARow = 2;  // one may be that of a peer that was kept from its CPU

std::optional<tcp_info> info_of(int socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  const bool is_known = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0;
  if (!is_known || bytes < offsetof(tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited) return {};
  return info;
}

bool leave_to_kernel(int socket) {
  return ::setsockopt(socket, SOL_SOCKET, kBufferLock, &kKernelsOwn, sizeof kKernelsOwn) == 0;
}

}  // namespace

std::optional<Delivery> delivery_of(int socket) {
  const std::optional<tcp_info> info = info_of(socket);
  if (!info) return std::nullopt;
  // Busy is also who waits for the peer's process to read.
  return Delivery{.bytes = info->tcpi_bytes_acked,
                  .busy = std::chrono::microseconds(info->tcpi_busy_time - info->tcpi_rwnd_limited)};
}

bool has_ended(int socket) {
  const std::optional<tcp_info> info = info_of(socket);
  return info && info->tcpi_state == kClosed;
}

void TcpSendBuffer::adopt(int socket) {
  const std::optional<tcp_info> info = info_of(socket);
  if (!info || info->tcpi_min_rtt > kNear.count() || !leave_to_kernel(socket)) return;
  constexpr int kHalf = kShortBytes / 2;  // the kernel doubles it
  is_short_ = ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kHalf, sizeof kHalf) == 0;
}

void TcpSendBuffer::note_full(int socket) {
  const auto now = Clock::now();
  if (!is_short_ || now - last_look_ < kLookInterval) return;
  last_look_ = now;
  if (const std::optional<tcp_info> info = info_of(socket)) {
    const bool is_too_short = rule_.take(std::chrono::microseconds(info->tcpi_busy_time),
                                         std::chrono::microseconds(info->tcpi_sndbuf_limited));
    if (is_too_short) is_short_ = !leave_to_kernel(socket);
  }
}

bool ShortBufferRule::take(std::chrono::microseconds busy, std::chrono::microseconds limited) {
  if (busy - busy_ < kWindow) return false;
  const bool is_held_up = 4 * (limited - limited_) > busy - busy_;
  in_a_row_ = is_held_up ? in_a_row_ + 1 : 0;
  busy_ = busy;
  limited_ = limited;
  return in_a_row_ >= kWindowsInARow;
}

}  // namespace zeropg

// What the kernel is asked and told about a TCP connection, beside its bytes.
//
// Note [Short send buffers]
// The kernel lets a send buffer grow to megabytes. Where the peer is near, that buys no speed: bytes that lie there for
// long have left the caches when they are sent, and while a thread copies so many at once, the peer's pile up in front
// of it, are thrown away and sent again. (64 MiB between two nodes over links without a limit: 28 to 40 ms, with 256
// KiB 15 ms, under BBR and CUBIC alike.) So a connection with a short round trip gets a short send buffer. A fast link
// may hold more under load than it seems to when it is made. The kernel counts for how long a connection had sent all
// that its buffer holds, and waited for room (tcpi_sndbuf_limited); where that is much of the time, the buffer is the
// kernel's again, for good. So it is on a slow link, which holds any number of bytes; there it does not matter.
#pragma once

#include <chrono>
#include <optional>

#include "backend/transport/network/wire.h"

namespace zeropg {

// Of a connected TCP socket. Empty: this kernel does not say (before 4.10). Times are as fine as its clock ticks: 1 to
// 10 ms.
std::optional<Delivery> delivery_of(int socket);

// Whether the connection is no more: both ends have said so and know it, or the peer has reset it. What it has not
// taken by then (SIOCOUTQ) it never will.
bool has_ended(int socket);

// When a short buffer holds up what is sent.
class ShortBufferRule {
 public:
  // What the kernel counted so far: time in which bytes were on their way or waited for it, and how much of it the
  // buffer was to blame for. True: it is too short.
  bool take(std::chrono::microseconds busy, std::chrono::microseconds limited);

 private:
  std::chrono::microseconds busy_{0};
  std::chrono::microseconds limited_{0};
  int in_a_row_ = 0;
};

// Of one connection.
class TcpSendBuffer {
 public:
  static constexpr std::chrono::microseconds kNear{200};
  static constexpr int kShortBytes = 256 << 10;  // as the kernel counts them, with its own overhead

  // `socket` is connected. Its buffer becomes short if the peer is near and the kernel can take that back (Linux 5.14).
  void adopt(int socket);
  // To be called when the buffer is full. Cheap.
  void note_full(int socket);

  bool is_short() const { return is_short_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_short_ = false;
  Clock::time_point last_look_{};
  ShortBufferRule rule_;
};

}  // namespace zeropg

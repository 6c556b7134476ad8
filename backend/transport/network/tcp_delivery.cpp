#include "backend/transport/network/tcp_delivery.h"

#include <linux/tcp.h>  // not netinet/tcp.h, whose tcp_info is an old one
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace zeropg {

std::optional<Delivery> delivery_of(int socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  const bool is_known = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0;
  if (!is_known || bytes < offsetof(tcp_info, tcpi_rwnd_limited) + sizeof info.tcpi_rwnd_limited) return std::nullopt;
  // Busy is also who waits for the peer's process to read.
  return Delivery{.bytes = info.tcpi_bytes_acked,
                  .busy = std::chrono::microseconds(info.tcpi_busy_time - info.tcpi_rwnd_limited)};
}

}  // namespace zeropg

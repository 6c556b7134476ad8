#include "backend/bootstrap/sockets/tcp_socket.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <span>

#include "backend/bootstrap/sockets/unix_socket.h"

namespace zeropg {
namespace {

constexpr size_t kMaxHosts = 64;

struct Sockaddr {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

bool parse_host(const std::string& host, uint16_t port, Sockaddr* address) {
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address->storage);
  if (::inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address->bytes = sizeof *v4;
    return true;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address->storage);
  if (::inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address->bytes = sizeof *v6;
    return true;
  }
  return false;
}

std::span<const uint8_t> address_bytes(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return {reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr), 4};
  }
  return {reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr), 16};
}

bool is_loopback(const std::string& host) { return host.starts_with("127.") || host == "::1"; }

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;

Interfaces interfaces_of_this_machine() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) {
    C10_THROW_ERROR(DistBackendError, c10::str("getifaddrs: ", std::strerror(errno)));
  }
  return {first, &::freeifaddrs};
}

bool is_usable(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return false;
  if (entry.ifa_addr->sa_family == AF_INET) return true;
  // Link-local addresses mean something only together with an interface of the machine that uses them.
  return entry.ifa_addr->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr);
}

bool shares_subnet(const Sockaddr& remote, const ifaddrs& own) {
  if (!is_usable(own) || own.ifa_netmask == nullptr || own.ifa_addr->sa_family != remote.get()->sa_family) return false;
  const auto there = address_bytes(remote.get());
  const auto here = address_bytes(own.ifa_addr);
  const auto mask = address_bytes(own.ifa_netmask);
  for (size_t i = 0; i < there.size(); ++i) {
    if (((there[i] ^ here[i]) & mask[i]) != 0) return false;
  }
  return true;
}

template <typename T>
void set_option(const Descriptor& socket, int level, int name, T value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);  // all of them are improvements only
}

// Empty where that cannot be, for the reason in errno. `is_reused`: connections of earlier processes that linger at the
// port do not count.
Descriptor listen_on(const sockaddr_storage& address, bool is_reused) {
  Descriptor socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  if (address.ss_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (is_reused) set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  const auto* bound = reinterpret_cast<const sockaddr*>(&address);
  const bool is_listening = ::bind(socket.get(), bound, sizeof address) == 0 && ::listen(socket.get(), SOMAXCONN) == 0;
  const int error = errno;
  if (!is_listening) socket.reset();
  errno = error;
  return socket;
}

Descriptor listen_at(uint16_t port, bool is_reused) {
  sockaddr_storage any6{};
  any6.ss_family = AF_INET6;
  reinterpret_cast<sockaddr_in6&>(any6).sin6_port = htons(port);
  Descriptor socket = listen_on(any6, is_reused);
  if (socket || errno == EADDRINUSE) return socket;
  sockaddr_storage any4{};  // a kernel without IPv6
  any4.ss_family = AF_INET;
  reinterpret_cast<sockaddr_in&>(any4).sin_port = htons(port);
  return listen_on(any4, is_reused);
}

}  // namespace

std::string encode(const TcpAddress& address) {
  std::string text = std::to_string(address.port) + "\n" + address.network_id;
  for (const std::string& host : address.hosts) text += "\n" + host;
  return text;
}

TcpAddress decode_tcp_address(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start <= text.size() && lines.size() < kMaxHosts + 2;) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.emplace_back(text.substr(start, end - start));
    start = end + 1;
  }
  TcpAddress address;
  const std::string& port = lines[0];
  const auto [rest, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  bool is_valid = error == std::errc() && rest == port.data() + port.size() && address.port != 0 && lines.size() >= 2;
  for (size_t i = 2; i < lines.size(); ++i) {
    Sockaddr parsed;
    is_valid = is_valid && parse_host(lines[i], address.port, &parsed);
    address.hosts.push_back(lines[i]);
  }
  if (!is_valid) C10_THROW_ERROR(DistBackendError, "an address in the store is damaged");
  address.network_id = lines[1];
  return address;
}

std::vector<InterfaceAddress> interface_addresses(const InterfaceRules& allowed) {
  std::vector<InterfaceAddress> found;
  const Interfaces all = interfaces_of_this_machine();
  for (const ifaddrs* entry = all.get(); entry != nullptr; entry = entry->ifa_next) {
    if (!is_usable(*entry)) continue;
    const auto bytes = address_bytes(entry->ifa_addr);
    if (!allowed.allow(entry->ifa_name, bytes)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    ::inet_ntop(entry->ifa_addr->sa_family, bytes.data(), text, sizeof text);
    found.push_back({entry->ifa_name, text});
  }
  std::stable_partition(found.begin(), found.end(), [](const auto& address) { return !is_loopback(address.host); });
  return found;
}

std::vector<std::string> local_addresses(const InterfaceRules& allowed) {
  std::vector<std::string> hosts;
  for (InterfaceAddress& address : interface_addresses(allowed)) hosts.push_back(std::move(address.host));
  if (hosts.size() > kMaxHosts) hosts.resize(kMaxHosts);
  TORCH_CHECK_WITH(DistBackendError, !hosts.empty(), "no network interface that is up",
                   allowed.text().empty() ? "" : " is allowed by \"" + allowed.text() + "\"",
                   "; look at `ip address`, or set ZEROPG_INTERFACE to those to use");
  return hosts;
}

std::vector<std::string> candidates(const TcpAddress& to, const std::string& own_network_id) {
  const Interfaces own = interfaces_of_this_machine();
  std::vector<std::string> near;
  std::vector<std::string> far;
  for (const std::string& host : to.hosts) {
    if (is_loopback(host)) {
      if (to.network_id == own_network_id) far.push_back(host);
      continue;
    }
    Sockaddr remote;
    parse_host(host, to.port, &remote);
    bool is_near = false;
    for (const ifaddrs* entry = own.get(); entry != nullptr; entry = entry->ifa_next) {
      is_near = is_near || shares_subnet(remote, *entry);
    }
    (is_near ? near : far).push_back(host);
  }
  near.insert(near.end(), far.begin(), far.end());
  return near;
}

Descriptor listen_tcp(const PortRange& ports, uint16_t* port) {
  // Processes of a node begin at different ports, so they seldom meet.
  const int32_t start = ports.is_any() ? 0 : static_cast<int32_t>(::getpid() % ports.count());
  Descriptor socket;
  for (int32_t i = 0; !socket && i < ports.count(); ++i) {
    const int32_t tried = ports.first + (start + i) % ports.count();
    socket = listen_at(static_cast<uint16_t>(tried), !ports.is_any());
    if (!socket && errno != EADDRINUSE) break;
  }
  if (!socket) {
    const std::string reason = std::strerror(errno);
    throw_if_out_of_descriptors("listen on a TCP port", errno);
    const std::string tried = ports.is_any()
                                  ? "a TCP port"
                                  : c10::str("a TCP port from ", ports.first, " to ", ports.last,
                                             " (ZEROPG_PORTS; every rank and group of a node needs one of its own)");
    C10_THROW_ERROR(DistBackendError, c10::str("cannot listen on ", tried, ": ", reason));
  }
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &bytes);
  *port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                            : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return socket;
}

Descriptor accept_tcp(const Descriptor& listener) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) throw_if_out_of_descriptors("accept a TCP connection", errno);
  return socket;
}

Descriptor connect_tcp(const std::string& host, uint16_t port) {
  Sockaddr address;
  TORCH_INTERNAL_ASSERT(parse_host(host, port, &address));
  Descriptor socket(::socket(address.get()->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const bool is_begun = socket && (::connect(socket.get(), address.get(), address.bytes) == 0 || errno == EINPROGRESS);
  if (!is_begun) throw_if_out_of_descriptors("connect over TCP", errno);
  if (!is_begun) C10_THROW_ERROR(DistNetworkError, std::strerror(errno));
  return socket;
}

int connect_error(const Descriptor& socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

void prepare_connection(const Descriptor& socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

}  // namespace zeropg

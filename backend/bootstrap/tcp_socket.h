// TCP sockets between nodes: where this process can be reached, and how to get there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/platform/process/descriptor.h"

namespace zeropg {

// Where a rank listens. Numeric addresses, no names: nothing is looked up.
struct TcpAddress {
  uint16_t port = 0;
  std::string network_id;          // loopback reaches only those with the same one
  std::vector<std::string> hosts;  // best first, loopback last
};

std::string encode(const TcpAddress& address);
// DistBackendError when `text` is not an encoded address.
TcpAddress decode_tcp_address(std::string_view text);

// The addresses of this process's interfaces that are up: those of `interfaces` ("eth0,ib": names or prefixes of
// names), all when it is empty. DistBackendError when there is none.
std::vector<std::string> local_addresses(const std::string& interfaces);
// The order in which to try to reach `to`: what shares a subnet with this machine first; loopback only where it leads
// there.
std::vector<std::string> candidates(const TcpAddress& to, const std::string& own_network_id);

// Listens on all addresses, port chosen by the system. Non-blocking.
Descriptor listen_tcp(uint16_t* port);
Descriptor accept_tcp(const Descriptor& listener);  // empty when nobody waits
// Begins to connect; poll for writing, then ask connect_error(). DistNetworkError when it cannot even begin.
Descriptor connect_tcp(const std::string& host, uint16_t port);
int connect_error(const Descriptor& socket);  // 0: connected

// Small messages at once, and a peer that vanished without a word is noticed within about half a minute.
void prepare_connection(const Descriptor& socket);

}  // namespace zeropg

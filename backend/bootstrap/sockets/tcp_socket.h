// TCP sockets between nodes: where this process can be reached, and how to get there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/platform/process/descriptor.h"
#include "backend/topology/network_rules.h"

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

struct InterfaceAddress {
  std::string interface;
  std::string host;
};

// Those of this process's interfaces that are up and allowed; loopback last.
std::vector<InterfaceAddress> interface_addresses(const InterfaceRules& allowed);
// The addresses of these. DistBackendError when there is none.
std::vector<std::string> local_addresses(const InterfaceRules& allowed);
// The order in which to try to reach `to`: what shares a subnet with this machine first; loopback only where it leads
// there.
std::vector<std::string> candidates(const TcpAddress& to, const std::string& own_network_id);

// Listens on all addresses, at a port of `ports` that is free. Non-blocking. DistBackendError when there is none.
Descriptor listen_tcp(const PortRange& ports, uint16_t* port);
Descriptor accept_tcp(const Descriptor& listener);  // empty when nobody waits
// Begins to connect; poll for writing, then ask connect_error(). DistNetworkError when it cannot even begin.
Descriptor connect_tcp(const std::string& host, uint16_t port);
int connect_error(const Descriptor& socket);  // 0: connected

// Small messages at once, and a peer that vanished without a word is noticed within about half a minute.
void prepare_connection(const Descriptor& socket);

}  // namespace zeropg

// Connects a rank with all its peers on other nodes, over TCP, while their group is made. Whoever listens lets in those
// that prove the group's secret and nobody else, and the port is closed as soon as everybody is there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/bootstrap/sockets/tcp_connector.h"
#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

// Calls `to`, and waits for the calls of the plan's callers. Returns the proven connections by rank. Calls `tick` now
// and then; it may throw. DistBackendError at the deadline, naming the ranks that are missing and why; PeerLost when a
// peer refuses this rank's proof, which it also does when it fails in the middle of it.
std::vector<PeerConnection> connect_mesh(Descriptor listener, const ConnectorPlan& plan, const std::vector<int32_t>& to,
                                         Clock::time_point deadline, const Tick& tick);

}  // namespace zeropg

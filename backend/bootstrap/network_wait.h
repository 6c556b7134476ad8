// Waits for ranks of other nodes while a group is made.
#pragma once

#include <functional>
#include <vector>

#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/transport/network/remote_transport.h"

namespace zeropg {

struct NetworkWait {
  Clock::time_point deadline;
  const Tick& tick;                                      // called now and then; it may throw
  const char* what;                                      // what does not come: "no answer"
  Clock::time_point wake_at = Clock::time_point::max();  // when to call `awaited` again at the latest
};

// Calls `awaited`, which does what can be done now, until no rank is left in its answer. PeerLost when one of these is
// lost or failed, DistBackendError at the deadline.
void wait_on_network(RemoteTransport& network, const NetworkWait& wait,
                     const std::function<std::vector<int32_t>()>& awaited);

// Asks these peers for a sign of life, and waits until each has answered. Throws as wait_on_network.
void greet_and_wait(RemoteTransport& network, const std::vector<int32_t>& peers, Clock::time_point deadline,
                    const Tick& tick);

}  // namespace zeropg

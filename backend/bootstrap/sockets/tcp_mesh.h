// Connects a rank with its peers on other nodes, over TCP. Whoever listens lets in those that prove the group's secret
// and nobody else, and the port is closed as soon as everybody is there.
//
//   listener  -> connector   its nonce
//   connector -> listener    its rank, its nonce, prove(kMember)
//   listener  -> connector   prove(kLeader)
//   connector -> listener    one byte: it has seen that proof
//
// All of fixed sizes: nothing is parsed before the proof, the rank only enters it. The proofs cover both ranks, both
// nonces and the group, so a recorded one is worth nothing on another connection, for another rank or group.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/bootstrap/sockets/tcp_socket.h"
#include "backend/bootstrap/sockets/unix_socket.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

struct MeshPlan {
  int32_t rank = 0;
  std::string group;                  // a name that no other group has
  std::string key;                    // proves membership
  std::string network_id;             // of this process, see TcpAddress
  std::vector<int32_t> to;            // peers to connect to
  std::vector<int32_t> from;          // peers that will connect
  std::vector<TcpAddress> addresses;  // by rank; those of `to` are used
};

// Returns the proven connections by rank. Calls `tick` now and then; it may throw. DistBackendError at the deadline,
// naming the ranks that are missing and why; PeerLost when a peer refuses this rank's proof, which it also does when it
// fails in the middle of it.
std::vector<PeerConnection> connect_mesh(const Descriptor& listener, const MeshPlan& plan, Clock::time_point deadline,
                                         const Tick& tick);

}  // namespace zeropg

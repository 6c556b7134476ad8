// The door of a node's group: its leader lets in the ranks that prove the secret, and nobody else.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/bootstrap/sockets/authenticated_socket.h"

namespace zeropg {

struct MeetingPlace {
  std::string name;  // of the leader's listening socket: random, published in the store
  std::string key;   // proves membership
};

struct Member {
  int32_t rank = -1;
  AuthenticatedSocket connection;
  Descriptor doorbell;
};

// Leader: returns one member per rank of `ranks`, in that order. Strangers (other users, no proof, a wrong one,
// silence, garbage) are dropped without delaying anybody. Calls `tick` now and then; it may throw. DistBackendError at
// the deadline, naming the ranks that did not come.
std::vector<Member> admit_members(const Descriptor& listener, const MeetingPlace& place,
                                  const std::vector<int32_t>& ranks, Clock::time_point deadline, const Tick& tick);

// Member: connects to the leader, which proves itself too, and hands it `doorbell`.
AuthenticatedSocket join_leader(const MeetingPlace& place, int32_t rank, int doorbell, Clock::time_point deadline,
                                const std::function<void()>& tick);

}  // namespace zeropg

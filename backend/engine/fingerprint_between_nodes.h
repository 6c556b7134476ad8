// What a rank says of a collective to one other rank. Inside a node the announcement serves the same purpose
// (Note [Fingerprints in a node] in fingerprint_in_node.h), but for an all-to-all's counts where these do not fit into
// it.
//
// Note [Call headers]
// Before its first bytes of a collective to a peer on another node, and of an all-to-all whose counts are not announced
// to any peer, a rank sends a CallHeader in the same stream, and the receiver compares it with its own call before it
// takes any byte. So different calls are an error on every rank:
// on those that compare at once, on the others when they hear of that failure or, where a rank expected nothing, when
// it next receives from that peer. Where all would receive and none sends, their signs of life carry the headers (Note
// [Waits] in peer_liveness.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/group/call_fingerprint.h"
#include "backend/group/group_context.h"
#include "backend/group/planner.h"

namespace zeropg {

// The headers of one execution, each sent and received at most once.
class InternodeFingerprints {
 public:
  // Both must outlive it.
  InternodeFingerprints(GroupContext& group, const PlannedCollective& collective, uint64_t sequence);

  // False: try again later. What has been done is remembered; true where the peer needs none.
  bool send_to(int32_t peer);
  // As send_to; throws DistBackendError when the peer called something else.
  bool receive_from(int32_t peer);

  WaitingCall of_this_rank() const;
  // Throws DistBackendError when a rank of another node said that it waits in a different call of the same number.
  void compare_with_waiting() const;

 private:
  struct Pair {
    size_t sent = 0;
    size_t received = 0;
    CallHeader theirs;
  };
  bool is_needed(int32_t peer) const;
  CallHeader header() const;  // but for pair_bytes
  CallHeader header_for(int32_t peer) const;

  GroupContext& group_;
  const PlannedCollective& collective_;
  const uint64_t sequence_;
  const bool is_near_needed_;  // also to ranks of this node
  std::vector<Pair> pairs_;    // by rank; empty where nobody needs any
};

}  // namespace zeropg

// What a rank says of a collective to one other rank. Inside a node the announcement serves the same purpose
// (Note [Fingerprints in a node] in fingerprint_in_node.h), but for an all-to-all's counts where these do not fit into
// it.
//
// Note [Fingerprints between nodes]
// Before its first bytes of a collective to a peer on another node, and of an all-to-all whose counts are not announced
// to any peer, a rank sends its call's fingerprint in the same stream, and the receiver compares it with its own before
// it takes any byte. So different calls are an error on every rank: on those that compare at once, on the others when
// they hear of that failure or, where a rank expected nothing, when it next receives from that peer. Where all would
// receive and none sends, their signs of life carry the fingerprints (Note [Waits] in peer_liveness.h). Where all send
// and none receives, as with a root on each node, what came is of a call that has ended here, and nobody reads it: so
// ranks look for such bytes before each call, and while they have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/engine/collective_context.h"
#include "backend/group/call_fingerprint.h"

namespace zeropg {

// Throws as check_call, about the last call, where a rank of another node has sent bytes for a collective that has
// ended here. Between collectives.
void compare_with_unread(const CollectiveContext& context);

// Of one execution; each is sent and received at most once.
class InternodeFingerprints {
 public:
  // All must outlive it.
  InternodeFingerprints(CollectiveContext& context, const CollectiveSpec& spec, const CallFingerprint& call);

  // False: try again later. What has been done is remembered; true where the peer needs none.
  bool send_to(int32_t peer);
  // As send_to; throws DistBackendError when the peer called something else.
  bool receive_from(int32_t peer);

  // Throws DistBackendError when a rank of another node said that it waits in a different call of the same number.
  void compare_with_waiting() const;

 private:
  struct Pair {
    size_t sent = 0;
    size_t received = 0;
    CallFingerprint theirs;
  };
  bool is_needed(int32_t peer) const;
  // Throws as check_call.
  void check(const CallFingerprint& theirs, const CallFingerprint& ours, int32_t peer) const;

  CollectiveContext& context_;
  const CollectiveSpec& spec_;
  const CallFingerprint& call_;
  const bool is_near_needed_;  // also to ranks of this node
  std::vector<Pair> pairs_;    // by rank; empty where nobody needs any
};

}  // namespace zeropg

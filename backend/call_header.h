// What a rank says of a collective to ranks of other nodes. Inside a node the announcement serves the same purpose
// (Note [Announcements] in execution.cpp).
//
// Note [Call headers]
// Before its first bytes of a collective to a peer on another node, a rank sends a CallHeader in the same stream, and
// the receiver compares it with its own call before it takes any byte. So different calls are an error on every rank:
// on those that compare at once, on the others when they hear of that failure or, where a rank expected nothing, when
// it next receives from that peer.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/group.h"
#include "backend/planner.h"

namespace zeropg {

// Plain numbers, since they may have come from a peer.
struct CallDescription {
  uint32_t op = 0;         // OpKind
  uint32_t dtype = 0;      // at::ScalarType
  uint32_t reduce_op = 0;  // ReduceOp
  int32_t root = 0;
  int64_t bytes = 0;
  double factor = 1;  // the real part
};

// FNV-1a: to notice ranks that were configured differently, not to keep anybody out.
uint64_t hash_of(const std::string& text);

// "all_reduce(Float, sum, 40 bytes)", or "garbage" where the numbers mean nothing.
std::string describe_call(const CallDescription& call);

struct CallHeader {
  uint64_t magic = 0;
  uint64_t sequence = 0;  // of the group's collectives
  CallDescription call;
  double imaginary_factor = 0;
  int64_t pair_bytes = 0;  // all_to_all: what the sender has for the receiver
  uint64_t codec = 0;      // a hash of its description, 0: none
  uint64_t algorithm = 0;  // a hash of the schedule's name
};

// The headers of one execution, each sent and received at most once.
class CallHeaders {
 public:
  // Both must outlive it.
  CallHeaders(Group& group, const Collective& collective, uint64_t sequence);

  // False: try again later. What has been done is remembered; peers of this node need none.
  bool send_to(int32_t peer);
  // As send_to; throws DistBackendError when the peer called something else.
  bool receive_from(int32_t peer);

 private:
  struct Pair {
    size_t sent = 0;
    size_t received = 0;
    CallHeader theirs;
  };
  CallHeader header_for(int32_t peer) const;
  void compare(int32_t peer, const CallHeader& theirs) const;

  Group& group_;
  const Collective& collective_;
  const uint64_t sequence_;
  std::vector<Pair> pairs_;  // by rank; empty where there is one node
};

}  // namespace zeropg

// What the ranks of a node tell each other of a collective, at its first barrier: the counterpart of what goes to other
// nodes (fingerprint_between_nodes.h).
//
// Note [Fingerprints in a node]
// A slot of the arena may be overwritten for sequence + 2 only when nobody reads it for `sequence` any more: every rank
// reads right after the first barrier of `sequence`, and the first barrier of sequence + 1 comes after that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "backend/engine/collective_context.h"
#include "backend/group/call_fingerprint.h"
#include "backend/group/planner.h"
#include "backend/transport/shm/cma.h"

namespace zeropg {

// Where others can reach this rank's tensors: Note [Direct schedules] in direct_access.h.
struct DirectOffer {
  uint32_t begins_direct = 0;  // 1: this rank began with the direct schedule
  uint32_t offers_direct = 0;  // 1: others can reach the tensors that they would: in the pool (tensor_pool.h), at
  int64_t pool_input = -1;     // these bytes of this rank's part; -1: not there
  int64_t pool_output = -1;
  uint64_t input_address = 0;  // or here, in the memory of `owner`; 0: not offered
  CmaIdentity owner;
  uint64_t reads_peers = 0;  // 1: this rank can read the memory of all others
};

// Of an all-to-all: how many bytes a rank sends to each rank and receives from each.
struct AnnouncedBlocks {
  int64_t sent[kMostAnnouncedBlocks] = {};
  int64_t received[kMostAnnouncedBlocks] = {};
};

// What lies in a rank's slot before any byte of its collective is believed.
struct Announcement {
  CallFingerprint call;
  DirectOffer direct;
  // AnnouncedBlocks where announces_blocks; where there is a codec its description. Else undefined.
  std::byte details[sizeof(AnnouncedBlocks)];

  AnnouncedBlocks blocks() const;
  std::string_view codec() const;  // "" where the call has none
};
static_assert(std::is_trivially_copyable_v<Announcement> && sizeof(Announcement) <= ShmArena::kSlotBytes);

class NodeFingerprints {
 public:
  // All must outlive it.
  NodeFingerprints(CollectiveContext& context, const PlannedCollective& collective, const CallFingerprint& call,
                   const OperationLabel& label);

  Announcement& mine() const { return of(context_.topology.rank); }
  Announcement& of(int32_t peer) const;

  void announce_call() const;  // before the first barrier
  // Behind it. Throws DistBackendError, saying who called what, when the ranks made different calls.
  void compare_calls() const;

 private:
  void compare_blocks() const;
  [[noreturn]] void throw_different_calls() const;

  CollectiveContext& context_;
  const PlannedCollective& collective_;
  const CallFingerprint& call_;
  const OperationLabel& label_;
};

}  // namespace zeropg

// What the ranks of a node tell each other of a collective, at its first barrier: the counterpart of the headers that
// go to other nodes (fingerprint_between_nodes.h).
//
// Note [Fingerprints in a node]
// Slot sequence % 2 may be overwritten for sequence + 2 only when nobody reads it for `sequence` any more: every rank
// reads right after the first barrier of `sequence`, and the first barrier of sequence + 1 comes after that.
#pragma once

#include <cstdint>

#include "backend/group/group_context.h"
#include "backend/group/planner.h"

namespace zeropg {

// Of an all-to-all: how many bytes a rank sends to each rank and receives from each.
struct AnnouncedBlocks {
  int64_t sent[kMostAnnouncedBlocks] = {};
  int64_t received[kMostAnnouncedBlocks] = {};
};
AnnouncedBlocks announced_blocks(const Announcement& said);  // where announces_blocks

class NodeFingerprints {
 public:
  // All must outlive it.
  NodeFingerprints(GroupContext& group, const PlannedCollective& collective, const OperationLabel& label,
                   uint64_t sequence);

  Announcement& mine() const { return of(group_.rank()); }
  Announcement& of(int32_t peer) const { return group_.arena().announcement(group_.local_rank(peer), sequence_); }

  void announce_call() const;  // before the first barrier
  // Behind it. Throws DistBackendError, saying who called what, when the ranks made different calls.
  void compare_calls() const;

 private:
  void compare_blocks() const;

  GroupContext& group_;
  const PlannedCollective& collective_;
  const OperationLabel& label_;
  const uint64_t sequence_;
};

}  // namespace zeropg

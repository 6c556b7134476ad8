// The tensors of other ranks of the node, for schedules that read, or write, them where they lie.
//
// Note [Direct schedules]
// A rank knows of its own tensors only whether others can reach them. So it begins with the direct schedule, whose
// first step is the barrier, where it offers its own for that, and with the staged one where it does not, or where the
// operation reaches none of its tensors. At the first barrier everybody reads what all have announced, and decides
// alike, from nothing that ranks may see differently (a rank with a list, or with little to send, has no direct
// schedule at all): the direct schedule, from behind that barrier, if all offer it; otherwise the staged one. Of that,
// who began with the other has not done the steps before the barrier yet; then all begin it again, who did them does
// them twice: they only copy inputs to staging that nobody reads before the next barrier.
// A tensor that is not in the pool is offered for reading (cma.h). Who can read whom is tried where that is offered
// first, by ranks that may, and announced with the next operation; such a tensor makes the schedule direct if all ranks
// can read all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/engine/fingerprint_in_node.h"

namespace zeropg {

class DirectAccess {
 public:
  // How much of a rank's tensor is at most read or written after it gave up.
  static constexpr int64_t kCheckBytes = 1 << 20;

  // All must outlive it.
  DirectAccess(CollectiveContext& context, const PlannedCollective& collective, const OperationLabel& label);

  // Before the first barrier, of this rank alone: whether it begins with the direct schedule; what it offers.
  bool begins_direct() const { return begins_direct_; }
  void offer(DirectOffer& mine) const;

  // Behind it, alike on all ranks.
  struct Decision {
    bool is_direct = false;
    bool must_restart = false;  // the staged schedule, since some began with the direct one
  };
  Decision decide(const NodeFingerprints& announcements);

  // The following in a direct schedule only. A tensor is mapped, or has to be read.
  std::byte* input_of(int32_t peer) const { return inputs_.at(static_cast<size_t>(peer)); }
  std::byte* output_of(int32_t peer) const { return outputs_.at(static_cast<size_t>(peer)); }
  bool must_read(int32_t peer) const { return addresses_.at(static_cast<size_t>(peer)) != 0; }
  // From `offset` in that rank's input. Throws DistNetworkError or DistBackendError when the rank, or the way, is gone.
  void read(int32_t peer, int64_t offset, std::span<std::byte> into);
  // Throws DistNetworkError when a rank has given up. Nobody passes the last barrier before this rank has arrived; so
  // who has left by now did so early, and may have changed what this rank has read of its tensor, or want it for itself
  // again.
  void check() const;

 private:
  bool offers_pool() const;
  bool offers_reading() const;
  void meet(int32_t peer, const CmaIdentity& identity);
  void locate(const NodeFingerprints& announcements);
  void locate_input(int32_t peer, const Announcement& said);
  std::byte* in_pool_of(int32_t rank, int64_t offset, int64_t bytes) const;

  CollectiveContext& context_;
  const PlannedCollective& collective_;
  const OperationLabel& label_;
  bool begins_direct_ = false;
  std::vector<std::byte*> inputs_;  // by rank; empty unless the direct schedule runs
  std::vector<std::byte*> outputs_;
  std::vector<uint64_t> addresses_;  // of inputs in the memory of those that are to be read; 0 for others
};

}  // namespace zeropg

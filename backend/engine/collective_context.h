// What the collectives of one group run on: its memory and connections, taken from it once, and what all ranks of the
// node count alike.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/group/call_fingerprint.h"
#include "backend/group/group_context.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/remote_transport.h"
#include "backend/transport/shm/cma_peers.h"
#include "backend/transport/shm/shm_arena.h"
#include "backend/transport/shm/tensor_pool.h"
#include "backend/transport/transport.h"

namespace zeropg {

// Used only by the one thread that runs the head of the collective queue, and in a Use of the group: nothing here keeps
// what the group lets go of (Note [Use] in group_context.h).
class CollectiveContext {
 public:
  explicit CollectiveContext(GroupContext& group);  // which must outlive it

  const Topology& topology;
  ShmArena& arena;
  TensorPool& pool;
  Peers& peers;
  StatisticsTable& statistics;
  RemoteTransport* const network;            // null: all ranks are on this node
  const std::vector<Transport*> transports;  // to each rank
  CmaPeers cma_peers;

  // Numbers the call that begins.
  const CallFingerprint& begin_call(CallFingerprint call) {
    call.sequence = call_.sequence + 1;
    return call_ = call;
  }
  const CallFingerprint& last_call() const { return call_; }  // that has begun
  uint64_t next_barrier() { return barriers_.fetch_add(1, std::memory_order_relaxed) + 1; }
  uint64_t last_barrier() const { return barriers_.load(std::memory_order_relaxed); }  // any thread
  // Ranks of this node that have not reached that barrier. Any thread.
  std::vector<int32_t> missing_at(uint64_t barrier) const { return topology.own_ranks(arena.missing(barrier)); }

  // A schedule counts banks from 0; its first one follows the last one of the schedule before it.
  std::byte* staging(int32_t rank, uint8_t bank) const {
    return staging_[2 * static_cast<size_t>(topology.local_rank[rank]) + (first_bank_ + bank) % 2];
  }
  void finish_banks(int32_t banks_used) { first_bank_ = (first_bank_ + banks_used) % 2; }
  std::byte* scratch(int64_t bytes);  // kept and reused; 64-byte aligned

 private:
  std::vector<std::byte*> staging_;  // two banks of each rank of the node
  std::atomic<uint64_t> barriers_{0};
  CallFingerprint call_;
  uint8_t first_bank_ = 0;
  std::vector<std::byte> scratch_;
};

}  // namespace zeropg

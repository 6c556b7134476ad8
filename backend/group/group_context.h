// What all operations of one process group share: its ranks and memory, its first failure, and the counters that every
// rank keeps in step.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/bootstrap/bootstrap.h"
#include "backend/diagnostics/wait_graph.h"
#include "backend/group/failure.h"
#include "backend/group/hooks.h"
#include "backend/group/operation_label.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/remote_transport.h"
#include "backend/transport/shm/cma_peers.h"
#include "backend/transport/shm/cpu_balancer.h"
#include "backend/transport/shm/shm_arena.h"
#include "backend/transport/transport.h"

namespace c10d {
class Work;
}

namespace zeropg {

// Counters of one kind of operation.
struct OperationStatistics {
  uint64_t calls = 0;
  uint64_t direct_calls = 0;  // of those, collectives that read and wrote tensors of other ranks where they lie
  int64_t bytes = 0;
  double seconds = 0;                   // from submission to completion
  std::vector<double> waiting_seconds;  // per rank: how long this rank was late for us
};

struct PeerStates {
  int32_t failed = -1;  // the first peer that has; -1: none
  std::string failure;  // what it says
  std::vector<int32_t> departed;
  std::vector<int32_t> dead;  // their processes are gone, or the way to them
  std::string loss;           // what happened to the connection to the first one of `dead`, if that is all we know
};
// Throws OperationError when a peer has failed, or when one of `awaited` has left or died.
void throw_if_lost(const OperationLabel& label, const PeerStates& peers, const std::vector<int32_t>& awaited);

class GroupContext : public std::enable_shared_from_this<GroupContext> {
 public:
  // `hooks` hear of completed operations and of the failure.
  GroupContext(BootstrapResult bootstrap, std::shared_ptr<const Hooks> hooks);
  ~GroupContext();

  // Note [Use]
  // An aborted group lets go of its memory, connections and descriptors, though works, segments and the process group
  // still hold it. Who touches those has a Use: they stay for as long as there is one, and go with the last.
  class Use {
   public:
    explicit Use(GroupContext& group, bool must_succeed = true);  // DistBackendError, the group's failure, if it let go
    ~Use() { leave(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    explicit operator bool() const { return is_given_; }
    void leave();
    bool enter();  // again

   private:
    GroupContext& group_;
    bool is_given_ = false;
  };
  void let_go();  // it has failed and left the engine

  int32_t rank() const { return bootstrap_.topology.rank; }
  int32_t world_size() const { return bootstrap_.topology.world_size(); }
  const Topology& topology() const { return bootstrap_.topology; }
  ShmArena& arena() { return *bootstrap_.arena; }         // of this node; it counts the ranks of node()
  CpuBalancer& cpu_balancer() { return *cpu_balancer_; }  // of the threads that wait for this group, in a Use
  CmaPeers& cma_peers() { return cma_peers_; }            // for the thread that runs the head of the collective channel
  TensorPool& pool() { return *bootstrap_.pool; }         // likewise
  const std::shared_ptr<TensorPool>& shared_pool() { return bootstrap_.pool; }
  RemoteTransport* network() { return bootstrap_.network.get(); }  // null: all ranks are on this node
  Transport& transport_to(int32_t peer) { return is_on_this_node(peer) ? *local_transport_ : *network(); }
  DescriptorChannel& descriptors() { return *bootstrap_.channel; }
  bool is_one_node() const { return bootstrap_.topology.node_count() == 1; }
  // The ranks of this node, ascending.
  const std::vector<int32_t>& node() const { return topology().nodes[topology().node_rank[rank()]]; }
  bool is_on_this_node(int32_t peer) const { return topology().node_rank[peer] == topology().node_rank[rank()]; }
  std::vector<int32_t> others_than(int32_t rank) const;
  // Of a rank of this node: its place in node() and in the arena.
  int32_t local_rank(int32_t peer) const { return topology().local_rank[peer]; }
  // Ranks of this node that have not reached the node's barrier.
  std::vector<int32_t> missing_at(uint64_t barrier) const;
  // False in a forked child: nothing of this group may be touched there.
  bool is_own_process() const;

  // Note [Failure]
  // The first failure of a group is its last state: operations that run fail with it, later ones raise it at the call,
  // and the peers hear of it, through the arena or the network. A new group must be made.
  void fail(const Failure& failure);  // any thread; the first one wins; wakes the peers
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  void throw_if_failed() const;                            // OperationError
  void throw_if_peer_failed(const OperationLabel& label);  // cheap: before an operation begins
  PeerStates peer_states();                                // system calls
  void depart();  // tells the peers that this rank left on purpose, unless it failed; later calls raise
  // "; no sign of life from ranks 2, 3", or "": which ranks of other nodes do not even answer.
  std::string silence() const;
  // What the progress of a lane waits for, said again at every check: `peer`, ShmArena::kAtBarrier or kAnybody, and
  // which ranks those are. Collectives also say in which call.
  static constexpr int32_t kAnybody = -2;
  void note_wait(Lane lane, int32_t peer, const std::vector<int32_t>& awaited,
                 const std::optional<WaitingCall>& call = {});
  WaitCulprits culprits_of(Lane lane, const std::vector<int32_t>& awaited);  // wait_graph.h
  // "waiting for ranks 1, 3"; a guess from any thread, for messages only.
  std::string who_is_late();

  // When an operation has succeeded, by the thread that ran it, without locks.
  void notify_complete(uint64_t completion_key, float duration_ms) const {
    hooks_->notify_complete(completion_key, duration_ms);
  }
  // How fail() gets the abort hooks off the progress thread. Set once, before use.
  void set_background(std::function<void(std::function<void()>)> background) { background_ = std::move(background); }

  // Used only by the one thread that runs the head of the collective channel.
  uint64_t next_barrier() { return barriers_.fetch_add(1, std::memory_order_relaxed) + 1; }
  uint64_t next_announcement() { return ++announcements_; }
  uint8_t physical_bank(uint8_t logical_bank) const { return (first_bank_ + logical_bank) % 2; }
  void finish_banks(int32_t banks_used) { first_bank_ = (first_bank_ + banks_used) % 2; }
  std::byte* scratch(int64_t bytes);  // kept and reused; 64-byte aligned

  // See Note [Tensor references] in work.h.
  void retire(c10::intrusive_ptr<c10d::Work> work);
  void release_retired();  // destroys tensors: not on the progress thread

  void count(const OperationLabel& label, double seconds, const std::vector<double>& waiting_seconds);
  void count_waiting(const OperationLabel& label, int32_t peer, double seconds);
  void count_direct(const OperationLabel& label);
  std::map<std::string, OperationStatistics> statistics() const;

 private:
  std::vector<int32_t> dead_neighbours();
  void tell_state(RankState state, const std::string& message = {});
  void free_if_unused();

  BootstrapResult bootstrap_;  // all but the topology goes when nobody uses the group after let_go()
  std::unique_ptr<Transport> local_transport_;
  std::unique_ptr<CpuBalancer> cpu_balancer_;
  CmaPeers cma_peers_;
  const pid_t owner_;

  std::atomic<int32_t> users_{0};
  std::atomic<bool> has_let_go_{false};
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  Failure failure_;                                        // guarded by mutex_
  std::vector<c10::intrusive_ptr<c10d::Work>> retired_;    // guarded by mutex_
  std::map<std::string, OperationStatistics> statistics_;  // guarded by mutex_
  const std::shared_ptr<const Hooks> hooks_;               // life shared with the process group
  std::function<void(std::function<void()>)> background_;
  std::mutex liveness_mutex_;
  std::chrono::steady_clock::time_point last_look_{};  // guarded by liveness_mutex_
  std::vector<int32_t> dead_;                          // guarded by liveness_mutex_

  std::atomic<uint64_t> barriers_{0};
  uint64_t announcements_ = 0;
  uint8_t first_bank_ = 0;
  std::vector<std::byte> scratch_;
};

}  // namespace zeropg

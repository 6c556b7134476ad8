// What all operations of one process group share: its ranks and memory, its first failure, and its end.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "backend/bootstrap/bootstrap.h"
#include "backend/group/failure.h"
#include "backend/group/hooks.h"
#include "backend/group/operation_label.h"
#include "backend/group/operation_statistics.h"
#include "backend/group/peers.h"
#include "backend/group/retired_works.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/remote_transport.h"
#include "backend/transport/shm/cpu_balancer.h"
#include "backend/transport/shm/shm_arena.h"
#include "backend/transport/transport.h"

namespace zeropg {

class GroupContext {
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
  // The following in a Use.
  ShmArena& arena() { return *bootstrap_.arena; }         // of this node; it counts the ranks of topology().own_node()
  CpuBalancer& cpu_balancer() { return *cpu_balancer_; }  // of the threads that wait for this group
  const std::shared_ptr<TensorPool>& pool() { return bootstrap_.pool; }
  RemoteTransport* network() { return bootstrap_.network.get(); }  // null: all ranks are on this node
  Transport& transport_to(int32_t peer) {
    return topology().is_on_this_node(peer) ? *local_transport_ : *bootstrap_.network;
  }
  DescriptorChannel& descriptors() { return *bootstrap_.channel; }
  Peers& peers() { return *peers_; }
  // False in a forked child: nothing of this group may be touched there.
  bool is_own_process() const;

  // Note [Failure]
  // The first failure of a group is its last state: operations that run fail with it, later ones raise it at the call,
  // and the peers hear of it, through the arena or the network. A new group must be made.
  void fail(const Failure& failure);  // any thread; the first one wins; wakes the peers
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  void throw_if_failed() const;  // OperationError
  void depart();                 // tells the peers that this rank left on purpose, unless it failed; later calls raise

  // When an operation has succeeded, by the thread that ran it, without locks.
  void notify_complete(uint64_t completion_key, float duration_ms) const {
    hooks_->notify_complete(completion_key, duration_ms);
  }
  // How abort hooks and callbacks get off the progress thread. Set once, before use.
  void set_background(std::function<void(std::function<void()>)> background) { background_ = std::move(background); }
  void run_in_background(std::function<void()> run) const { background_(std::move(run)); }

  StatisticsTable& statistics() { return statistics_; }
  RetiredWorks& retired_works() { return retired_works_; }

 private:
  void free_if_unused();

  BootstrapResult bootstrap_;  // all but the topology goes when nobody uses the group after let_go()
  std::unique_ptr<Transport> local_transport_;
  std::unique_ptr<CpuBalancer> cpu_balancer_;
  std::unique_ptr<Peers> peers_;
  const pid_t owner_;

  std::atomic<int32_t> users_{0};
  std::atomic<bool> has_let_go_{false};
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  Failure failure_;                           // guarded by mutex_
  const std::shared_ptr<const Hooks> hooks_;  // life shared with the process group
  std::function<void(std::function<void()>)> background_;
  StatisticsTable statistics_;
  RetiredWorks retired_works_;
};

// DistBackendError in a forked child, where nobody would ever run the operation.
void check_own_process(const GroupContext& group, const OperationLabel& label);

}  // namespace zeropg

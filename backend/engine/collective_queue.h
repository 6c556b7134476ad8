// The collectives of one group, run one at a time in the order of the calls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/diagnostics/pause_detector.h"
#include "backend/engine/collective_context.h"
#include "backend/engine/link_watch.h"
#include "backend/engine/progress_engine.h"
#include "backend/engine/queue_of_group.h"
#include "backend/engine/schedule_executor.h"
#include "backend/engine/work.h"
#include "backend/group/group_context.h"
#include "backend/group/planner.h"

namespace zeropg {

inline constexpr const char* kMonitoredBarrierTitle = "zeropg:monitored_barrier";

// One call: one collective, or several that a coalesced call runs in order.
struct CollectiveJob {
  c10::intrusive_ptr<ZeroWork> work;
  std::vector<PlannedCollective> collectives;
  int64_t copied_bytes() const;  // at most, by this rank

  // Of the thread that runs the job:
  void end_collective();  // the current one
  size_t current = 0;
  std::optional<ScheduleExecutor> executor;                    // of the current one, in the end of the last one
  std::vector<double> waiting_seconds;                         // per rank, of the collectives that have ended
  std::optional<std::chrono::steady_clock::time_point> start;  // the deadline counts from here
};

// Note [Who runs a channel]
// Exactly one thread at a time runs the head of the queue: the one that holds the channel. A thread that waits for one
// of its works takes the hold as soon as it can, runs the queue itself and lets go when its work is complete. While
// peers are late it sleeps in shared memory; on several nodes it lets go then, since only the progress thread hears the
// network. Meanwhile the progress thread keeps away; it runs what nobody waits for, and is woken by whoever lets go of
// a queue that is not empty. So a small collective costs no change of threads, and nobody has to wait for one.
class CollectiveQueue final : public QueueOfGroup, public Channel {
 public:
  CollectiveQueue(std::shared_ptr<GroupContext> group, ProgressEngine& engine);

  // Before the first job: from now on keeps the planner's links current. On every rank of the group, or on none.
  void watch_links(std::shared_ptr<Planner> planner);

  // Queues the job. Whoever submits a synchronous one waits for its work next, and thereby runs it. What is small,
  // together with what is queued before it, begins in the calling thread; all else is the progress thread's until
  // somebody waits. Does not wait for the job.
  void submit(std::unique_ptr<CollectiveJob> job, bool is_synchronous);

  // See OperationHost.
  void help(const ZeroWork& work, std::chrono::steady_clock::time_point until) override;
  std::string who_is_late() override;  // a guess from any thread

  bool is_waited_for() const { return helpers_.load() > 0; }  // by a thread that runs the queue, or will
  // The progress thread has to run what is queued.
  bool is_left_to_engine() const { return !is_waited_for() && head() != nullptr; }

  // True once every job that was submitted has ended.
  bool wait_until_idle(std::chrono::milliseconds limit);

  // See Channel.
  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override;
  void set_sleeping(bool is_sleeping) override;
  int32_t local_world_size() const override { return static_cast<int32_t>(group_->topology().own_node().size()); }

 private:
  class Turn;

  bool try_hold();
  bool let_go();  // true: there is nothing left in the queue
  // These five, only by the thread that holds the channel. `own` is the work that the thread waits for: it has an
  // owner.
  Activity advance_held(const ZeroWork* own);
  void check_held(const ZeroWork* own);
  bool has_unread() const;      // from other nodes
  bool has_unfinished() const;  // between nodes
  void check_idle();  // whether peers have called something else than the last collective, which has ended here
  void fail_all_held(const CollectiveJob& job, const std::exception_ptr& reason, const ZeroWork* own);  // job: the head
  CollectiveJob* head() const;

  Progress run(CollectiveJob& job);
  void check(CollectiveJob& job);
  void finish(std::unique_ptr<CollectiveJob> job, const std::exception_ptr& error, const ZeroWork* own);

  ProgressEngine& engine_;
  CollectiveContext context_;                 // of the thread that holds the channel
  PauseDetector pause_detector_;              // of the thread that holds the channel
  std::unique_ptr<LinkWatch> links_;          // of the thread that holds the channel; null: nobody watches them
  std::optional<OperationLabel> last_ended_;  // of the thread that holds the channel
  std::atomic<int32_t> helpers_{0};           // threads inside help()
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::unique_ptr<CollectiveJob>> queue_;  // guarded by mutex_; only the holder takes from it
  int64_t queued_bytes_ = 0;                          // guarded by mutex_; that the jobs in it copy
  bool is_held_ = false;                              // guarded by mutex_
};

// Turns what stopped an operation into the OperationError that its callers see: it names the operation, and the peer
// that failed, left or died where that is the cause.
std::exception_ptr describe_error(GroupContext& group, const OperationLabel& label, const std::exception_ptr& error,
                                  const std::vector<int32_t>& awaited = {});
Failure failure_of(const std::exception_ptr& error);  // which describe_error made

}  // namespace zeropg

// The collectives of one group, run one at a time in the order of the calls.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/engine.h"
#include "backend/execution.h"
#include "backend/group.h"
#include "backend/planner.h"
#include "backend/work.h"

namespace zeropg {

inline constexpr const char* kMonitoredBarrierTitle = "zeropg:monitored_barrier";

// One call: one collective, or several that a coalesced call runs in order.
struct CollectiveJob {
  c10::intrusive_ptr<ZeroWork> work;
  std::vector<Collective> collectives;

  // Of the thread that runs the job:
  size_t current = 0;
  std::optional<Execution> execution;
  std::optional<std::chrono::steady_clock::time_point> start;  // the deadline counts from here
};

class CollectiveChannel final : public Channel {
 public:
  CollectiveChannel(std::shared_ptr<Group> group, Engine& engine);

  // Synchronous jobs on an idle channel run in the calling thread until they would have to sleep; all else runs on the
  // progress thread. Does not wait for the job.
  void submit(std::unique_ptr<CollectiveJob> job, bool is_synchronous);

  // True once every job that was submitted has ended.
  bool wait_until_idle(std::chrono::milliseconds limit);

  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override;
  void set_sleeping(bool is_sleeping) override;
  int32_t local_world_size() const override;

 private:
  Progress run(CollectiveJob& job);
  bool run_in_calling_thread(CollectiveJob& job);
  void check(CollectiveJob& job);
  void finish(std::unique_ptr<CollectiveJob> job, const std::exception_ptr& error, bool is_engine_thread);
  void fail_all_on_engine_thread(const std::exception_ptr& error);
  CollectiveJob* head();

  std::shared_ptr<Group> group_;  // life shared with the process group
  Engine& engine_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::unique_ptr<CollectiveJob>> queue_;  // guarded by mutex_; only the engine's thread takes from it
  bool is_held_ = false;                              // guarded by mutex_: a calling thread runs a job
};

// Turns what stopped an operation into the error that its callers see: it names the operation, and the peer that
// failed, left or died where that is the cause.
std::exception_ptr describe_error(Group& group, const OperationLabel& label, const std::exception_ptr& error);

}  // namespace zeropg

#include "backend/engine/collective_queue.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

#include "backend/diagnostics/format_ranks.h"
#include "backend/diagnostics/notices.h"
#include "backend/platform/cpu/waiter.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kInlineBytes = 64 << 10;  // what a call may copy before it returns: some microseconds

// A dead rank that is not awaited may have done its part. But it may also be one of those whom the awaited await, and
// these may have given up: then nobody would find out before the deadline. So after this time it counts in any case.
constexpr std::chrono::seconds kPatienceWithTheDead{2};

std::exception_ptr error_of(const OperationLabel& label, const char* text) {
  return std::make_exception_ptr(
      OperationError({__func__, __FILE__, __LINE__}, {.text = c10::str(label.prefix(), ": ", text)}));
}

// What people and tools look for in the error of a monitored barrier, in gloo's words.
std::string describe_monitored(const OperationLabel& label, const ZeroWork& work,
                               const std::vector<int32_t>& culprits) {
  if (std::string_view(label.title) != kMonitoredBarrierTitle) {
    return "";
  }
  std::string ranks = format_ranks(culprits);
  ranks[0] = 'R';
  return c10::str(ranks, " failed to pass monitoredBarrier in ", work.timeout().count(), " ms; ");
}

}  // namespace

std::exception_ptr describe_error(GroupContext& group, const OperationLabel& label, const std::exception_ptr& error,
                                  const std::vector<int32_t>& awaited) {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const c10::DistNetworkError&) {
      std::vector<int32_t> suspects = awaited;  // others may well have left, having done their part
      if (suspects.empty()) {
        suspects.resize(static_cast<size_t>(group.world_size()));
        std::iota(suspects.begin(), suspects.end(), 0);
      }
      throw_if_lost(label, group.peers().states(), suspects);
      throw;
    }
  } catch (const OperationError&) {
    return std::current_exception();
  } catch (const c10::Error& other) {
    return error_of(label, other.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return error_of(
        label,
        "this rank has no memory left for it; look at `ulimit -v` and at what else the process keeps, or use"
        " smaller tensors.");
  } catch (const std::exception& other) {
    return error_of(label, other.what());
  }
}

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const OperationError& known) {
    return known.failure();
  }
}

int64_t CollectiveJob::copied_bytes() const {
  return std::accumulate(
      collectives.begin(), collectives.end(), int64_t{0},
      [](int64_t bytes, const PlannedCollective& collective) { return bytes + collective.copied_bytes; });
}

void CollectiveJob::end_collective() {
  const std::vector<double>& waited = executor->waiting_seconds();
  waiting_seconds.resize(std::max(waiting_seconds.size(), waited.size()));
  std::transform(waited.begin(), waited.end(), waiting_seconds.begin(), waiting_seconds.begin(), std::plus<>());
  if (++current < collectives.size()) {
    executor.reset();
  }
}

// A thread's stay in help(): what it holds, it lets go of, and what it leaves undone is the progress thread's.
class CollectiveQueue::Turn {
 public:
  explicit Turn(CollectiveQueue& channel) : channel_(channel) { enter(); }
  ~Turn() {
    if (is_inside_) {
      leave();
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  void enter() {
    is_inside_ = true;
    channel_.helpers_.fetch_add(1);
  }
  bool try_hold() { return is_held_ || (is_held_ = channel_.try_hold()); }
  void leave() {
    if (std::exchange(is_held_, false)) channel_.let_go();
    is_inside_ = false;
    channel_.helpers_.fetch_sub(1);  // before the look and the bell: the progress thread keeps away from who is inside
    if (channel_.head() != nullptr || channel_.has_unfinished()) channel_.engine_.wake();
  }

 private:
  CollectiveQueue& channel_;
  bool is_inside_ = false;
  bool is_held_ = false;
};

CollectiveQueue::CollectiveQueue(std::shared_ptr<GroupContext> group, ProgressEngine& engine)
    : QueueOfGroup(std::move(group)), engine_(engine), context_(*group_) {}

void CollectiveQueue::watch_links(std::shared_ptr<Planner> planner) {
  links_ = std::make_unique<LinkWatch>(*group_, std::move(planner));
}

void CollectiveQueue::submit(std::unique_ptr<CollectiveJob> job, bool is_synchronous) {
  group_->retired_works().release();
  const GroupContext::Use use(*group_);
  const c10::intrusive_ptr<ZeroWork> work = job->work;
  bool is_quick = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group_->throw_if_failed();
    queued_bytes_ += job->copied_bytes();
    is_quick = queued_bytes_ <= kInlineBytes;
    queue_.push_back(std::move(job));
  }
  if (is_synchronous) {
    return;
  }
  if (!is_quick || !try_hold()) {
    engine_.wake();
    return;
  }
  advance_held(work.get());
  if (!let_go()) {
    engine_.wake_soon();  // what its peers need is done: now it is they who are awaited
  } else if (has_unfinished()) {
    engine_.wake();
  }
}

bool CollectiveQueue::try_hold() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(is_held_, true);
}

bool CollectiveQueue::let_go() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_held_ = false;
  if (queue_.empty()) {
    idle_.notify_all();
  }
  return queue_.empty();
}

void CollectiveQueue::help(const ZeroWork& work, Clock::time_point until) {
  check_own_process(*group_, work.label());
  GroupContext::Use use(*group_, /*must_succeed=*/false);
  if (!use) {
    return;  // the work has failed, or is just failing
  }
  Turn turn(*this);
  Waiter waiter(engine_.ranks_on_node(), kCallersPatience);
  auto next_check = Clock::now() + kSignalCheckInterval;
  while (!work.is_complete()) {
    Activity activity = Activity::kBlocked;
    if (turn.try_hold()) {
      activity = advance_held(&work);
      if (work.is_complete()) {
        return;
      }
    }
    if (activity == Activity::kMoved) {
      waiter.reset();
    } else if (!waiter.should_sleep()) {
      waiter.pause();
      group_->cpu_balancer().look(Clock::now());
    } else if (group_->topology().is_one_node() && turn.try_hold()) {
      group_->arena().doze(std::min(until, next_check),
                           [&] { return advance_held(&work) != Activity::kBlocked || work.is_complete(); });
      waiter.reset();
    } else {
      return;  // the progress thread sleeps for this one too: it hears the network, and others who hold the queue
    }
    const auto now = Clock::now();
    if (now >= until) {
      return;
    }
    if (now >= next_check) {  // bytes that keep coming must not hide the deadline, a rank that died or a signal
      next_check = now + kSignalCheckInterval;
      if (turn.try_hold()) {
        check_held(&work);
      }
      turn.leave();
      use.leave();
      check_signals();  // which may abort the group
      if (!use.enter()) {
        return;
      }
      turn.enter();
    }
  }
}

Progress CollectiveQueue::run(CollectiveJob& job) {
  group_->throw_if_failed();
  if (!job.start) {
    job.start = std::chrono::steady_clock::now();
    context_.peers.throw_if_failed(job.work->label());
    job.work->copy_in();
  }
  bool has_moved = false;
  while (job.current < job.collectives.size()) {
    if (!job.executor) {
      compare_with_unread(context_);
      PlannedCollective& next = job.collectives[job.current];
      job.executor.emplace(context_, links_ == nullptr ? next : links_->begin(next), job.work->label());
    }
    const Progress progress = job.executor->advance();
    if (progress != Progress::kDone) {
      return has_moved ? Progress::kMoved : progress;
    }
    has_moved = true;
    if (links_ == nullptr || links_->end()) {
      job.end_collective();
    } else {
      job.executor.reset();
    }
  }
  return Progress::kDone;
}

void CollectiveQueue::finish(std::unique_ptr<CollectiveJob> job, const std::exception_ptr& error, const ZeroWork* own) {
  c10::intrusive_ptr<ZeroWork> work = std::move(job->work);
  last_ended_ = work->label();
  if (error) {
    group_->fail(failure_of(error));
  } else {
    const auto now = Clock::now();
    group_->statistics().count(work->label(),
                               job->start ? std::chrono::duration<double>(now - *job->start).count() : 0.0,
                               job->waiting_seconds);
  }
  job.reset();  // with it the last use of the tensors' addresses
  if (!error) {
    group_->notify_complete(work->completion_key(), work->elapsed_ms());
  }
  end_work(std::move(work), error, own);
}

CollectiveJob* CollectiveQueue::head() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front().get();
}

Activity CollectiveQueue::advance_on_engine_thread() {
  if (!is_left_to_engine() || !try_hold()) {
    return Activity::kIdle;
  }
  const Activity activity = advance_held(nullptr);
  let_go();
  return activity;
}

Activity CollectiveQueue::advance_held(const ZeroWork* own) {
  Activity activity = Activity::kIdle;
  while (CollectiveJob* job = head()) {
    Progress progress = Progress::kBlocked;
    try {
      progress = run(*job);
    } catch (...) {
      fail_all_held(*job, std::current_exception(), own);
      return Activity::kMoved;
    }
    if (progress != Progress::kDone) {
      return progress == Progress::kMoved || activity == Activity::kMoved ? Activity::kMoved : Activity::kBlocked;
    }
    activity = Activity::kMoved;
    std::unique_ptr<CollectiveJob> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done = std::move(queue_.front());
      queue_.pop_front();
      queued_bytes_ -= done->copied_bytes();
    }
    const bool is_own = done->work.get() == own;
    finish(std::move(done), nullptr, own);
    if (is_own) {
      break;  // what is behind it is for whoever waits for that
    }
  }
  return activity;
}

void CollectiveQueue::fail_all_held(const CollectiveJob& job, const std::exception_ptr& reason, const ZeroWork* own) {
  const std::exception_ptr error = describe_error(*group_, job.work->label(), reason,
                                                  job.executor ? job.executor->awaited() : std::vector<int32_t>());
  std::deque<std::unique_ptr<CollectiveJob>> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed.swap(queue_);
    queued_bytes_ = 0;
  }
  for (auto& one : failed) {
    finish(std::move(one), error, own);
  }
}

void CollectiveQueue::check_on_engine_thread() {
  if (!is_waited_for() && (head() != nullptr || has_unread()) && try_hold()) {
    check_held(nullptr);
    let_go();
  }
}

void CollectiveQueue::check_held(const ZeroWork* own) {
  CollectiveJob* job = head();
  if (job == nullptr) {
    check_idle();
    return;
  }
  if (!job->start) {
    return;
  }
  try {
    check(*job);
  } catch (...) {
    fail_all_held(*job, std::current_exception(), own);
  }
}

bool CollectiveQueue::has_unfinished() const {
  return context_.network != nullptr && context_.network->has_unfinished();
}

bool CollectiveQueue::has_unread() const {
  return context_.network != nullptr && !context_.network->unread(Lane::kCollective, 1).empty();
}

void CollectiveQueue::check_idle() {
  if (!last_ended_ || group_->has_failed()) {
    return;
  }
  try {
    compare_with_unread(context_);
  } catch (const c10::Error& error) {
    const std::string text =
        c10::str(last_ended_->prefix(), ", which has ended on this rank: ", error.what_without_backtrace());
    group_->fail({.text = text});
    notice("calls", text);  // there may be no other call whose error would say it
  }
}

void CollectiveQueue::check(CollectiveJob& job) {
  group_->throw_if_failed();
  if (!job.executor) {
    return;
  }
  const OperationLabel& label = job.work->label();
  // In this order: what a peer did before it left, or died, still counts.
  const PeerStates peers = context_.peers.states();
  const bool has_moved = run(job) != Progress::kBlocked;
  const std::vector<int32_t> awaited = job.executor->awaited();
  if (awaited.empty()) {
    return;
  }
  throw_if_lost(label, has_moved ? PeerStates{} : peers, awaited);
  job.executor->note_wait();
  const auto now = Clock::now();
  if (!has_moved && now - *job.start > kPatienceWithTheDead) {
    throw_if_lost(label, peers, peers.dead);
  }
  if (!pause_detector_.may_blame(now, *job.start) || now - *job.start < job.work->timeout()) {
    return;
  }
  const WaitCulprits found = context_.peers.culprits_of(Lane::kCollective, awaited);
  throw OperationError(
      {__func__, __FILE__, __LINE__},
      {.kind = FailureKind::kTimeout,
       .text = c10::str(label.prefix(), ": ", describe_monitored(label, *job.work, found.culprits), "timed out after ",
                        job.work->timeout().count(), " ms ", job.executor->describe_wait(), ", waiting for ",
                        format_ranks(awaited), found.chain, context_.peers.silence(), "; ",
                        advise_to_look_at(found.culprits),
                        " (a stopped process, another collective, a slow step) or raise the timeout of the group.")});
}

std::string CollectiveQueue::who_is_late() {
  const GroupContext::Use use(*group_, /*must_succeed=*/false);
  if (!use) {
    return "";
  }
  const std::vector<int32_t> missing = context_.missing_at(context_.last_barrier());
  return missing.empty() ? std::string() : "waiting for " + format_ranks(missing);
}

bool CollectiveQueue::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [&] { return queue_.empty() && !is_held_; });
}

void CollectiveQueue::set_sleeping(bool is_sleeping) {
  if (!is_sleeping || is_left_to_engine()) {
    group_->arena().set_sleeping(is_sleeping);
  }
}

}  // namespace zeropg

#include "backend/collective_channel.h"

#include <c10/util/Exception.h>

#include <numeric>

#include "backend/transport/waiter.h"

namespace zeropg {

namespace {

constexpr c10::SourceLocation kHere{"describe_error", __FILE__, 0};

// What people and tools look for in the error of a monitored barrier, in gloo's words.
std::string describe_monitored(const OperationLabel& label, const ZeroWork& work, const std::vector<int32_t>& awaited) {
  if (std::string_view(label.title) != kMonitoredBarrierTitle) {
    return "";
  }
  std::string ranks = list_ranks(awaited);
  ranks[0] = 'R';
  return c10::str(ranks, " failed to pass monitoredBarrier in ", work.timeout().count(), " ms; ");
}

}  // namespace

std::exception_ptr describe_error(Group& group, const OperationLabel& label, const std::exception_ptr& error) {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const c10::DistNetworkError& lost) {
      std::vector<int32_t> everybody(static_cast<size_t>(group.world_size()));
      std::iota(everybody.begin(), everybody.end(), 0);
      throw_if_lost(label, group.peer_states(), everybody);
      throw;
    }
  } catch (const c10::Error& known) {
    const std::string text = known.what_without_backtrace();
    return text.starts_with("[zeropg rank")
               ? std::current_exception()
               : std::make_exception_ptr(c10::DistBackendError(kHere, c10::str(label.prefix(), ": ", text)));
  } catch (const std::exception& other) {
    return std::make_exception_ptr(c10::DistBackendError(kHere, c10::str(label.prefix(), ": ", other.what())));
  }
}

CollectiveChannel::CollectiveChannel(std::shared_ptr<Group> group, Engine& engine)
    : group_(std::move(group)), engine_(engine) {}

void CollectiveChannel::submit(std::unique_ptr<CollectiveJob> job, bool is_synchronous) {
  group_->release_retired();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group_->throw_if_failed();
    if (!is_synchronous || is_held_ || !queue_.empty()) {
      queue_.push_back(std::move(job));
    } else {
      is_held_ = true;
    }
  }
  if (!job) {
    engine_.wake();
    return;
  }
  std::exception_ptr error;
  bool is_done = false;
  try {
    is_done = run_in_calling_thread(*job);
  } catch (...) {
    error = describe_error(*group_, job->work->label(), std::current_exception());
  }
  if (is_done || error) {
    finish(std::move(job), error, /*is_engine_thread=*/false);
  }
  bool is_idle = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = false;
    if (job) {
      queue_.push_front(std::move(job));
    }
    is_idle = queue_.empty();
  }
  if (is_idle) {
    idle_.notify_all();
  } else {
    engine_.wake();
  }
}

// False: it would have to sleep, which is the progress thread's part.
bool CollectiveChannel::run_in_calling_thread(CollectiveJob& job) {
  constexpr std::chrono::milliseconds kCheckInterval{50};
  Waiter waiter(engine_.ranks_on_node());
  auto next_check = std::chrono::steady_clock::now() + kCheckInterval;
  while (true) {
    const Progress progress = run(job);
    if (progress == Progress::kDone) {
      return true;
    }
    if (const auto now = std::chrono::steady_clock::now(); now >= next_check) {
      check(job);  // bytes that keep coming must not hide the deadline or a rank that died
      next_check = now + kCheckInterval;
    }
    if (progress == Progress::kMoved) {
      waiter.reset();
    } else if (waiter.should_sleep()) {
      return false;
    } else {
      waiter.pause();
    }
  }
}

Progress CollectiveChannel::run(CollectiveJob& job) {
  group_->throw_if_failed();
  if (!job.start) {
    job.start = std::chrono::steady_clock::now();
    group_->throw_if_peer_failed(job.work->label());
  }
  bool has_moved = false;
  while (job.current < job.collectives.size()) {
    if (!job.execution) {
      job.execution.emplace(*group_, job.collectives[job.current], job.work->label());
    }
    const Progress progress = job.execution->advance();
    if (progress != Progress::kDone) {
      return has_moved ? Progress::kMoved : progress;
    }
    has_moved = true;
    if (++job.current < job.collectives.size()) {
      job.execution.reset();
    }
  }
  return Progress::kDone;
}

void CollectiveChannel::finish(std::unique_ptr<CollectiveJob> job, const std::exception_ptr& error,
                               bool is_engine_thread) {
  c10::intrusive_ptr<ZeroWork> work = std::move(job->work);
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error& known) {
      group_->fail(known.what_without_backtrace());
    }
  } else {
    const auto now = std::chrono::steady_clock::now();
    group_->count(work->label(), job->start ? std::chrono::duration<double>(now - *job->start).count() : 0.0,
                  job->execution ? job->execution->waiting_seconds() : std::vector<double>());
  }
  job.reset();  // with it the last use of the tensors' addresses
  if (!error) {
    group_->notify_complete(work->completion_key(), work->elapsed_ms());
  }
  work->complete(error);
  if (is_engine_thread) {
    group_->retire(std::move(work));
  }
}

CollectiveJob* CollectiveChannel::head() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_held_ || queue_.empty() ? nullptr : queue_.front().get();
}

Activity CollectiveChannel::advance_on_engine_thread() {
  Activity activity = Activity::kIdle;
  while (CollectiveJob* job = head()) {
    Progress progress = Progress::kBlocked;
    std::exception_ptr error;
    try {
      progress = run(*job);
    } catch (...) {
      error = describe_error(*group_, job->work->label(), std::current_exception());
    }
    if (error) {
      fail_all_on_engine_thread(error);
      return Activity::kMoved;
    }
    if (progress != Progress::kDone) {
      return progress == Progress::kMoved || activity == Activity::kMoved ? Activity::kMoved : Activity::kBlocked;
    }
    activity = Activity::kMoved;
    std::unique_ptr<CollectiveJob> done;
    bool is_idle = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done = std::move(queue_.front());
      queue_.pop_front();
      is_idle = queue_.empty();
    }
    finish(std::move(done), nullptr, /*is_engine_thread=*/true);
    if (is_idle) {
      idle_.notify_all();
    }
  }
  return activity;
}

void CollectiveChannel::fail_all_on_engine_thread(const std::exception_ptr& error) {
  std::deque<std::unique_ptr<CollectiveJob>> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failed.swap(queue_);
  }
  for (auto& job : failed) {
    finish(std::move(job), error, /*is_engine_thread=*/true);
  }
  idle_.notify_all();
}

void CollectiveChannel::check_on_engine_thread() {
  CollectiveJob* job = head();
  if (job == nullptr || !job->start) {
    return;
  }
  try {
    check(*job);
  } catch (...) {
    fail_all_on_engine_thread(describe_error(*group_, job->work->label(), std::current_exception()));
  }
}

void CollectiveChannel::check(CollectiveJob& job) {
  group_->throw_if_failed();
  if (!job.execution) {
    return;
  }
  const OperationLabel& label = job.work->label();
  // In this order: a peer that arrived and then left is not awaited any more.
  const PeerStates peers = group_->peer_states();
  const std::vector<int32_t> awaited = job.execution->awaited();
  if (awaited.empty()) {
    return;
  }
  throw_if_lost(label, peers, awaited);
  const auto waited = std::chrono::steady_clock::now() - *job.start;
  if (waited < job.work->timeout()) {
    return;
  }
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(label.prefix(), ": ", describe_monitored(label, *job.work, awaited), "timed out after ",
               job.work->timeout().count(), " ms ", job.execution->describe_wait(), ", waiting for ",
               list_ranks(awaited), group_->silence(),
               "; see what they do (a stopped process, another collective, a slow step) or raise the timeout of the"
               " group."));
}

bool CollectiveChannel::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [&] { return queue_.empty() && !is_held_; });
}

void CollectiveChannel::set_sleeping(bool is_sleeping) {
  if (!is_sleeping || head() != nullptr) {
    group_->arena().set_sleeping(is_sleeping);
  }
}

int32_t CollectiveChannel::local_world_size() const { return static_cast<int32_t>(group_->node().size()); }

}  // namespace zeropg

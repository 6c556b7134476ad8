#include "backend/engine/progress_engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

#include "backend/platform/cpu/time_slice.h"
#include "backend/platform/cpu/waiter.h"
#include "backend/platform/process/doorbell.h"

namespace zeropg {

namespace {

constexpr std::chrono::milliseconds kCheckInterval{50};  // how late a deadline or a dead peer is noticed at most

// Note [Naps]
// A thread that posts a receive, or begins a small collective, nearly always waits for it next, and then runs it
// itself. To wake the progress thread for each would cost two system calls and, worse, a CPU that a peer needs. So
// after wake_soon() the thread sleeps a millisecond at a time, and only after some calm for good: a caller that does
// not wait is served all the same.
constexpr std::chrono::milliseconds kNap{1};
constexpr int32_t kCalmNaps = 20;

// Signals are for the threads of the program; only a fault of this thread is this thread's.
void block_signals() {
  sigset_t signals;
  sigfillset(&signals);
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
    sigdelset(&signals, signal);
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace

ProgressEngine& ProgressEngine::of_this_process() {
  static std::mutex mutex;
  static ProgressEngine* engine =
      nullptr;  // never destroyed: channels may be removed after static destructors have begun
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (engine == nullptr || owner != ::getpid()) {
    engine = new ProgressEngine();
    owner = ::getpid();
  }
  return *engine;
}

void ProgressEngine::add(const std::vector<Channel*>& channels) {
  std::lock_guard<std::mutex> life(life_);
  if (!callbacks_) {
    callbacks_ = std::make_shared<CallbackPool>();
  }
  for (const Channel* channel : channels) {
    ranks_on_node_ = std::max(ranks_on_node_.load(), channel->local_world_size());
  }
  removers_.fetch_add(1);
  std::lock_guard<std::mutex> lock(mutex_);
  removers_.fetch_sub(1);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });  // it waits for mutex_
  }
  channels_.insert(channels_.end(), channels.begin(), channels.end());
}

void ProgressEngine::remove(const std::vector<Channel*>& channels, bool waits_for_callbacks) {
  std::unique_lock<std::mutex> life(life_);
  bool is_last = false;
  {
    removers_.fetch_add(1);
    std::lock_guard<std::mutex> lock(mutex_);
    removers_.fetch_sub(1);
    for (Channel* channel : channels) {
      std::erase(channels_, channel);
      channel->set_sleeping(false);
    }
    is_last = channels_.empty();
  }
  restore_slices();  // of whoever waited; who still does has a short one again when it sleeps
  if (!is_last) {
    return;
  }
  if (thread_.joinable()) {
    is_stopping_ = true;
    ring_doorbell(process_doorbell());
    thread_.join();
    is_stopping_ = false;
  }
  ranks_on_node_ = 1;
  const std::shared_ptr<CallbackPool> callbacks = std::exchange(callbacks_, nullptr);
  life.unlock();  // a callback that is waited for may itself make or drop a group
  if (waits_for_callbacks) {
    callbacks->stop();
  } else {
    callbacks->let_go();
  }
}

void ProgressEngine::wake() {
  if (is_sleeping_.load()) {
    ring_doorbell(process_doorbell());
  }
}

void ProgressEngine::wake_soon() {
  has_call_ = true;
  if (is_sleeping_.load() && !is_napping_.load()) {
    ring_doorbell(process_doorbell());
  }
}

// How long the thread may sleep when nothing waits for it.
std::chrono::milliseconds ProgressEngine::idle_sleep() {
  if (has_call_.exchange(false)) {
    naps_left_ = kCalmNaps;
  }
  is_napping_ = naps_left_ > 0;
  // A call that came before the flag went down may have relied on it.
  if (!is_napping_ && has_call_.load()) {
    is_napping_ = true;
  }
  naps_left_ = std::max(0, naps_left_ - 1);
  return is_napping_ ? kNap : Sleep::kForGood;
}

std::shared_ptr<CallbackPool> ProgressEngine::callbacks() {
  std::lock_guard<std::mutex> life(life_);
  return callbacks_;
}

Activity ProgressEngine::advance_all() {
  Activity most = Activity::kIdle;
  for (Channel* channel : channels_) {
    most = std::max(most, channel->advance_on_engine_thread());
  }
  return most;
}

void ProgressEngine::run() {
  pthread_setname_np(pthread_self(), "zeropg-engine");
  block_signals();
  shorten_slice_for_good();
  int32_t ranks = ranks_on_node();
  Waiter waiter(ranks, kProgressPatience);
  auto last_check = std::chrono::steady_clock::now();
  while (!is_stopping_.load()) {
    while (removers_.load() > 0) {
      std::this_thread::yield();
    }
    if (ranks != ranks_on_node()) {
      ranks = ranks_on_node();
      waiter = Waiter(ranks, kProgressPatience);
    }
    Activity activity;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      activity = advance_all();
      const auto now = std::chrono::steady_clock::now();
      if (now - last_check >= kCheckInterval) {
        last_check = now;
        for (Channel* channel : channels_) {
          channel->check_on_engine_thread();
        }
      }
    }
    if (activity == Activity::kMoved) {
      waiter.reset();
    } else if (activity == Activity::kBlocked && !waiter.should_sleep()) {
      waiter.pause();
    } else {
      sleep();
    }
  }
}

// Whoever changes something after the flags are up rings the bell; what changed before is seen by the pass after them.
void ProgressEngine::sleep() {
  is_sleeping_ = true;
  Activity activity;
  std::chrono::milliseconds limit = Sleep::kForGood;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Channel* channel : channels_) {
      channel->set_sleeping(true);
    }
    activity = advance_all();
    descriptors_.clear();
    for (Channel* channel : channels_) {
      const Sleep sleep = channel->sleep();
      limit = std::min(limit, sleep.limit);
      if (sleep.descriptor >= 0) {
        descriptors_.push_back(sleep.descriptor);
        activity = channel->arm() ? activity : Activity::kMoved;
      }
    }
  }
  if (activity != Activity::kMoved && !is_stopping_.load()) {
    limit = std::min(limit, activity == Activity::kIdle ? idle_sleep() : kCheckInterval);
    wait_doorbell(process_doorbell(), limit, descriptors_);
  }
  is_sleeping_ = false;
  is_napping_ = false;
  std::lock_guard<std::mutex> lock(mutex_);
  for (Channel* channel : channels_) {
    channel->set_sleeping(false);
    channel->check_on_engine_thread();
  }
}

}  // namespace zeropg

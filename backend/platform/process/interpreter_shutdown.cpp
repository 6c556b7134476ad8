#include "backend/platform/process/interpreter_shutdown.h"

#include <unistd.h>

#include <atomic>
#include <thread>

namespace zeropg {

namespace {

using Clock = std::chrono::steady_clock;

// Between the end of a wait and the GIL lie some microseconds, and on a busy machine the turns of other threads.
constexpr std::chrono::milliseconds kTimeToTakeTheGil{500};

// All of the whole process: its end concerns every group.
std::atomic<ShutdownCheck> installed{nullptr};
std::atomic<int> waiting{0};
std::atomic<int> running{0};
std::atomic<Clock::time_point> last_end{Clock::time_point::min()};

bool is_main_thread() {
  static thread_local const bool is_main = ::gettid() == ::getpid();
  return is_main;
}

}  // namespace

void set_shutdown_check(ShutdownCheck check) { installed = check; }

WaitingThread::WaitingThread() {
  if (!is_main_thread()) waiting.fetch_add(1);
}

WaitingThread::~WaitingThread() {
  if (!is_main_thread()) {
    last_end = Clock::now();
    waiting.fetch_sub(1);
  }
  const ShutdownCheck has_ended = installed.load(std::memory_order_acquire);
  while (has_ended != nullptr && has_ended()) {
    ::pause();  // until the process is gone
  }
}

bool has_waiting_threads() {
  const Clock::time_point end = last_end.load();
  return waiting.load() > 0 || (end != Clock::time_point::min() && Clock::now() - end < kTimeToTakeTheGil);
}

void release_waiting_threads(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (waiting.load() > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(kTimeToTakeTheGil);
}

RunsBeforeShutdown::RunsBeforeShutdown() { running.fetch_add(1); }

RunsBeforeShutdown::~RunsBeforeShutdown() { running.fetch_sub(1); }

void wait_for_runs_before_shutdown(std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (running.load() > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void forget_waiting_threads() {
  waiting = 0;
  running = 0;
}

}  // namespace zeropg

#include "backend/waiting_threads.h"

#include <unistd.h>

#include <atomic>
#include <thread>

namespace zeropg {

namespace {

// Between the end of a wait and the GIL lie some microseconds, and on a busy machine the turns of other threads.
constexpr std::chrono::milliseconds kTimeToTakeTheGil{100};

std::atomic<EndCheck> installed{nullptr};  // of the process's interpreter, of which there is one
std::atomic<int> waiting{0};               // of the whole process: its end concerns every group

}  // namespace

void set_end_check(EndCheck check) { installed = check; }

UntilInterpreterEnds::~UntilInterpreterEnds() {
  const EndCheck has_ended = installed.load(std::memory_order_acquire);
  while (has_ended != nullptr && has_ended()) {
    ::pause();  // until the process is gone
  }
}

WaitingThread::WaitingThread() { waiting.fetch_add(1); }
WaitingThread::~WaitingThread() { waiting.fetch_sub(1); }

bool has_waiting_threads() { return waiting.load() > 0; }

void let_waiting_threads_out(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (has_waiting_threads() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::this_thread::sleep_for(kTimeToTakeTheGil);
}

}  // namespace zeropg

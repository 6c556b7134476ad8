#include "backend/platform/process/signal_check.h"

#include <atomic>

#include "backend/platform/cpu/time_slice.h"

namespace zeropg {

namespace {

std::atomic<SignalCheck> installed{nullptr};  // of the process's interpreter, of which there is one

}  // namespace

void set_signal_check(SignalCheck check) { installed = check; }

void check_signals() {
  if (const SignalCheck check = installed.load(std::memory_order_acquire)) {
    restore_slice();  // a handler may start processes
    check();
  }
}

}  // namespace zeropg

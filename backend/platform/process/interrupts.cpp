#include "backend/platform/process/interrupts.h"

#include <atomic>

#include "backend/platform/cpu/time_slice.h"

namespace zeropg {

namespace {

std::atomic<InterruptCheck> installed{nullptr};  // of the process's interpreter, of which there is one

}  // namespace

void set_interrupt_check(InterruptCheck check) { installed = check; }

void check_interrupts() {
  if (const InterruptCheck check = installed.load(std::memory_order_acquire)) {
    restore_slice();  // a handler may start processes
    check();
  }
}

}  // namespace zeropg

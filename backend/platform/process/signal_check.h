// Lets the program answer a signal while one of its threads waits for an operation.
#pragma once

#include <chrono>

namespace zeropg {

// How long a waiting thread goes without asking.
constexpr std::chrono::milliseconds kSignalCheckInterval{50};

// What the bindings install: runs the interpreter's signal handlers where that is this thread's part. May throw (a
// KeyboardInterrupt), and may take the GIL. Null: signals are the program's own affair.
using SignalCheck = void (*)();
void set_signal_check(SignalCheck check);

// Called about every kSignalCheckInterval by a thread of the program that waits, holding no lock. Never on the progress
// thread. What it throws ends the wait, not the operation.
void check_signals();

}  // namespace zeropg

// What becomes of threads that wait for operations when the program's interpreter ends.
//
// Note [Threads at the end]
// CPython before 3.14 ends a thread that wants the GIL of an ending interpreter by pthread_exit, which unwinds the C++
// frames on the thread's stack. Bindings take the GIL back in a destructor, through which nothing may be thrown: the
// process aborts, although its program is done. Only daemon threads and threads of C++ come into this. Those whose wait
// ends when the groups are closed for good are therefore let out first, while the interpreter is whole and nobody holds
// the GIL; and a thread whose wait ends later never returns from it.
#pragma once

#include <chrono>

namespace zeropg {

// What the bindings install: whether the interpreter has begun to end and will not let this thread in again. Needs no
// GIL. Null: there is no interpreter.
using ShutdownCheck = bool (*)();
void set_shutdown_check(ShutdownCheck check);

// A thread's stay in a call that the closing of a group ends. The main thread, which ends the interpreter, is not
// counted.
class WaitingThread {
 public:
  WaitingThread();
  ~WaitingThread();  // does not return once the interpreter ends: the caller would take the GIL back
  WaitingThread(const WaitingThread&) = delete;
  WaitingThread& operator=(const WaitingThread&) = delete;
};

// Whether threads wait, or waited a moment ago and may still be on their way to the GIL.
bool has_waiting_threads();
// Gives threads whose wait ends the time to take the GIL, which the caller must not hold. At most `patience` for the
// waits to end.
void release_waiting_threads(std::chrono::milliseconds patience);
// Something on another thread that wants the GIL and ends by itself, such as torch's dump of a group that failed: from
// when it is asked for to its end.
class RunsBeforeShutdown {
 public:
  RunsBeforeShutdown();
  ~RunsBeforeShutdown();
  RunsBeforeShutdown(const RunsBeforeShutdown&) = delete;
  RunsBeforeShutdown& operator=(const RunsBeforeShutdown&) = delete;
};
// Waits for them, at most `patience`. The GIL must not be held.
void wait_for_runs_before_shutdown(std::chrono::milliseconds patience);
// In a forked child, which has none of its parent's.
void forget_waiting_threads();

}  // namespace zeropg

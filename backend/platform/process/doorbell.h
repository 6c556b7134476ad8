// The event descriptor on which the process's progress thread sleeps, one for all groups.
#pragma once

#include <chrono>
#include <span>

namespace zeropg {

// The process's own doorbell: non-blocking, close-on-exec, never closed; a forked child gets one of its own.
int process_doorbell();

void ring_doorbell(int event_fd);  // async-signal-safe; never blocks
// Sleeps until someone rings, one of `others` can be read, or `limit` passes; silences the bell. True when it rang.
bool wait_doorbell(int event_fd, std::chrono::milliseconds limit, std::span<const int> others = {});

}  // namespace zeropg

// How long a thread wanted a processor.
#pragma once

#include <chrono>

namespace zeropg {

// How long this thread ran or waited for its turn since it began; where the kernel does not say how long it waited, how
// long it ran. Between two calls, what is missing to the wall clock is what it slept. Takes some microseconds.
std::chrono::nanoseconds runnable_time();

}  // namespace zeropg

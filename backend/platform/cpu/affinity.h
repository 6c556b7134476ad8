// On which CPUs the calling thread runs.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropg {

// Those that it may run on, ascending; empty where the kernel does not say. A system call.
std::vector<int32_t> allowed_cpus();

// Moves it there once; what it may run on stays as it is. False: the kernel refused. Some tens of microseconds.
bool move_to_cpu(int32_t cpu);

}  // namespace zeropg

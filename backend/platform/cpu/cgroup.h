// What the machine and the control groups of this process allow it. Files are read at every call: for start-up only.
#pragma once

#include <cstdint>
#include <string>

namespace zeropg {

// Where to look; tests point it at a folder of their own.
struct MachineFiles {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// The smallest of physical memory and the limits (v1 and v2) of this process's control group and its ancestors.
// INT64_MAX when nothing can be read.
int64_t memory_limit_bytes(const MachineFiles& files = {});

// What could be had of it now without swapping: the smallest of what the machine says is available and what the limits
// leave, counting cached files as free. INT64_MAX when nothing can be read.
int64_t memory_available_bytes(const MachineFiles& files = {});

// CPUs' worth of time per period under cpu.max (v2) or cfs_quota_us (v1), the smallest up the tree; infinity: no limit.
double cpu_limit(const MachineFiles& files = {});

}  // namespace zeropg

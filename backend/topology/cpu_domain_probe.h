// Finds out which CPUs of its node a process is near to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zeropg {

// A name that two processes of a node share where all CPUs that they may run on share a level 3 cache ("cache:0-7", its
// CPUs), else where they are in one NUMA node ("memory:0"). Empty: this process may run on CPUs of several. The calling
// thread's affinity counts.
std::string probe_domain_id();

// The same of given CPUs, as the folder `system` ("/sys/devices/system") says. What is missing there or cannot be read
// is no cache and no NUMA node.
std::string domain_id_of(const std::vector<int32_t>& cpus, const std::string& system);

}  // namespace zeropg

// Finds out on which node this process runs.
#pragma once

#include <string>

namespace zeropg {

// Equal for two processes exactly when they can share an arena: same running kernel (boot_id), same network namespace
// (abstract sockets live in it) and same user namespace (uids mean the same).
std::string probe_host_id();
// As `hostname` says it.
std::string probe_host_name();
// Equal for two processes that reach each other over loopback, whatever ZEROPG_HOST_ID says.
std::string probe_network_id();

}  // namespace zeropg

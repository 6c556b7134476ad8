// What the kernel counts of a TCP connection's way to its peer.
#pragma once

#include <optional>

#include "backend/transport/network/wire.h"

namespace zeropg {

// Of a connected TCP socket. Empty: this kernel does not say (before 4.10). Times are as fine as its clock ticks: 1 to
// 10 ms.
std::optional<Delivery> delivery_of(int socket);

}  // namespace zeropg

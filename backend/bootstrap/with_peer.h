// Failures of one connection, in words that name the rank at its other end.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "backend/diagnostics/peer_lost.h"

namespace zeropg {

// What `action` returns. Its DistNetworkError becomes a PeerLost: the connection may have broken because that rank
// failed, which then says why.
template <typename Action>
auto with_peer(int32_t peer, const Action& action) {
  try {
    return action();
  } catch (const PeerLost&) {
    throw;
  } catch (const c10::DistNetworkError& error) {
    throw PeerLost({__func__, __FILE__, __LINE__}, c10::str("rank ", peer, ": ", error.what_without_backtrace()), peer);
  }
}

}  // namespace zeropg

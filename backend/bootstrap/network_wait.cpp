#include "backend/bootstrap/network_wait.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "backend/diagnostics/format_ranks.h"
#include "backend/diagnostics/peer_lost.h"

namespace zeropg {
namespace {

void throw_if_lost(const PeerLiveness& liveness, const std::vector<int32_t>& ranks) {
  for (const int32_t rank : ranks) {
    const RemoteState state = liveness.state_of(rank);
    if (!state.is_lost && state.state != RankState::kFailed) continue;
    const std::string& why = state.is_lost ? state.loss : state.failure;
    throw PeerLost({__func__, __FILE__, __LINE__}, c10::str("rank ", rank, ": ", why), rank);
  }
}

}  // namespace

void wait_on_network(RemoteTransport& network, const NetworkWait& wait,
                     const std::function<std::vector<int32_t>()>& awaited) {
  auto next_tick = Clock::now() + kTick;
  for (std::vector<int32_t> ranks = awaited(); !ranks.empty(); ranks = awaited()) {
    const auto now = Clock::now();
    if (now >= next_tick || now >= wait.deadline) {
      wait.tick(ranks);
      next_tick = now + kTick;
    }
    TORCH_CHECK_WITH(DistBackendError, now < wait.deadline, network.name(), ": ", wait.what, " from ",
                     format_ranks(ranks), " in time; look at what those ranks were doing, or raise the timeout");
    throw_if_lost(network.liveness(), ranks);
    if (network.progress() || !network.arm()) continue;
    pollfd entry{network.descriptor(), POLLIN, 0};
    const auto wake_at = wait.wake_at > now ? wait.wake_at : Clock::time_point::max();
    poll_until({&entry, 1}, std::min({wait.deadline, next_tick, wake_at}));
  }
}

void greet_and_wait(RemoteTransport& network, const std::vector<int32_t>& peers, Clock::time_point deadline,
                    const Tick& tick) {
  network.greet(peers);
  wait_on_network(network, {deadline, tick, "no answer"},
                  [&] { return network.liveness().silent_for(std::chrono::milliseconds(0)); });
}

}  // namespace zeropg

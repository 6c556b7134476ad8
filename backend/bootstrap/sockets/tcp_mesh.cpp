#include "backend/bootstrap/sockets/tcp_mesh.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backend/diagnostics/format_ranks.h"
#include "backend/diagnostics/peer_lost.h"

namespace zeropg {
namespace {

std::string complaint(const TcpConnector& connector, const std::vector<int32_t>& called,
                      const std::vector<int32_t>& callers) {
  std::string text;
  for (const int32_t peer : called) {
    const std::string trouble = connector.trouble_with(peer);
    text += c10::str(text.empty() ? "" : "; ", "rank ", peer, " was not reached (",
                     trouble.empty() ? "no answer" : trouble, ")");
  }
  if (!callers.empty()) {
    text += c10::str(text.empty() ? "" : "; ", format_ranks(callers), " did not connect to this rank in time");
  }
  if (connector.refused() > 0) {
    text += c10::str(" (", connector.refused(),
                     " connections did not prove the group's secret: set the same ZEROPG_SECRET everywhere)");
  }
  return text +
         "; look at what those ranks were doing and whether the network lets TCP through, choose with "
         "ZEROPG_INTERFACE, or raise the timeout";
}

}  // namespace

std::vector<PeerConnection> connect_mesh(Descriptor listener, const ConnectorPlan& plan, const std::vector<int32_t>& to,
                                         Clock::time_point deadline, const Tick& tick) {
  std::vector<PeerConnection> connections(plan.addresses.size());
  std::vector<int32_t> called = to;
  std::vector<int32_t> callers = plan.callers;
  TcpConnector connector(std::move(listener), plan);
  for (const int32_t peer : called) {
    TORCH_CHECK_WITH(DistBackendError, !candidates(plan.addresses.at(peer), plan.network_id).empty(), "rank ", peer,
                     " has no address but loopback, which does not lead there from here; give its machine a network"
                     " interface");
    connector.call(peer);
  }
  auto next_tick = Clock::now() + kTick;
  while (!called.empty() || !callers.empty()) {
    pollfd entry{connector.descriptor(), POLLIN, 0};
    poll_until({&entry, 1}, deadline);
    ConnectorNews news = connector.advance();
    for (ConnectorNews::Made& made : news.made) {
      connections[made.peer] = std::move(made.connection);
      std::erase(called, made.peer);
      std::erase(callers, made.peer);
    }
    if (!news.lost.empty()) {
      const ConnectorNews::Lost& lost = news.lost.front();
      throw PeerLost({__func__, __FILE__, __LINE__}, c10::str("rank ", lost.peer, " at ", lost.reason), lost.peer);
    }
    const auto now = Clock::now();
    if (now >= next_tick || now >= deadline) {
      std::vector<int32_t> missing = callers;
      missing.insert(missing.end(), called.begin(), called.end());
      tick(missing);
      next_tick = now + kTick;
    }
    if (now >= deadline && (!called.empty() || !callers.empty())) {
      C10_THROW_ERROR(DistBackendError, complaint(connector, called, callers));
    }
  }
  return connections;
}

}  // namespace zeropg

#include "backend/bootstrap/join_network.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backend/bootstrap/network_wait.h"
#include "backend/bootstrap/sockets/authentication.h"
#include "backend/bootstrap/sockets/tcp_connector.h"
#include "backend/bootstrap/sockets/tcp_mesh.h"
#include "backend/diagnostics/notices.h"
#include "backend/topology/topology_probe.h"

namespace zeropg {
namespace {

// Over the c10d store, whose entries the group's secret signs.
class StoreOutOfBand final : public OutOfBand {
 public:
  StoreOutOfBand(const WireEntry& wire, const NetworkPlan& plan, StoreExchange& store_exchange)
      : wire_(wire), plan_(plan), store_exchange_(store_exchange) {}

  std::vector<PeerConnection> connect_to_peers() override;
  std::unique_ptr<Connector> connect_on_demand() override;
  std::vector<PeerContact> exchange_addresses(const std::string& own) override;

 private:
  // Listens, and exchanges addresses with all ranks; the plan has those of `called`.
  ConnectorPlan open_door(const std::vector<int32_t>& called, const std::vector<int32_t>& callers,
                          Descriptor* listener);
  std::string pair_key(int32_t peer, const std::string& own_nonce, const std::string& their_nonce) const;

  const WireEntry& wire_;
  const NetworkPlan& plan_;
  StoreExchange& store_exchange_;
};

ConnectorPlan StoreOutOfBand::open_door(const std::vector<int32_t>& called, const std::vector<int32_t>& callers,
                                        Descriptor* listener) {
  ConnectorPlan plan{.own = {.rank = plan_.rank, .group = plan_.group, .key = plan_.key},
                     .network_id = probe_network_id(),
                     .addresses = std::vector<TcpAddress>(static_cast<size_t>(plan_.world_size)),
                     .callers = callers};
  TcpAddress own{.port = 0, .network_id = plan.network_id, .hosts = local_addresses(plan_.interfaces)};
  *listener = listen_tcp(plan_.ports, &own.port);
  const std::vector<std::string> addresses =
      store_exchange_.exchange_addresses(encode(own), called, {plan_.group, plan_.key});
  for (const int32_t peer : called) plan.addresses[peer] = decode_tcp_address(addresses[peer]);
  return plan;
}

// Those with a lower rank listen.
std::vector<PeerConnection> StoreOutOfBand::connect_to_peers() {
  std::vector<int32_t> called;
  std::vector<int32_t> callers;
  for (const int32_t peer : plan_.peers) (peer < plan_.rank ? called : callers).push_back(peer);
  Descriptor listener;
  const ConnectorPlan plan = open_door(called, callers, &listener);
  return connect_mesh(std::move(listener), plan, called, plan_.deadline, plan_.tick);
}

std::unique_ptr<Connector> StoreOutOfBand::connect_on_demand() {
  Descriptor listener;
  ConnectorPlan plan = open_door(plan_.peers, plan_.peers, &listener);
  plan.patience = std::chrono::milliseconds(30'000);  // as with a connection on which nothing is acknowledged
  return std::make_unique<TcpConnector>(std::move(listener), std::move(plan));
}

std::vector<PeerContact> StoreOutOfBand::exchange_addresses(const std::string& own) {
  const Nonce nonce = random_nonce();
  const std::string own_nonce(nonce.data(), nonce.size());
  const std::vector<std::string> entries =
      store_exchange_.exchange_addresses(own_nonce + own, plan_.peers, {plan_.group, plan_.key});
  std::vector<PeerContact> contacts(entries.size());
  for (const int32_t peer : plan_.peers) {
    const std::string& entry = entries[static_cast<size_t>(peer)];
    TORCH_CHECK_WITH(DistBackendError, entry.size() > sizeof(Nonce), "the address of rank ", peer,
                     " in the store is damaged");
    contacts[static_cast<size_t>(peer)] = {entry.substr(sizeof(Nonce)),
                                           pair_key(peer, own_nonce, entry.substr(0, sizeof(Nonce)))};
  }
  return contacts;
}

// For this group's life: both nonces enter it, so nothing that was recorded earlier fits.
std::string StoreOutOfBand::pair_key(int32_t peer, const std::string& own_nonce, const std::string& their_nonce) const {
  const auto [lower, higher] = std::minmax(peer, plan_.rank);
  const std::string nonces = peer < plan_.rank ? their_nonce + own_nonce : own_nonce + their_nonce;
  const std::string pair = plan_.group + "/" + std::to_string(lower) + "<" + std::to_string(higher);
  const Digest key = hmac_sha256(plan_.key, c10::str("zeropg ", wire_.name, " key1").append(nonces).append(pair));
  return {key.begin(), key.end()};
}

}  // namespace

const WireEntry& chosen_wire(const std::string& name, const WireOffer& offer, int32_t rank, int32_t world_size) {
  const std::string start = c10::str("[zeropg rank ", rank, "/", world_size, "] ");
  TORCH_CHECK_WITH(DistBackendError, !name.empty(),
                   "no network that every rank can use; `python -m zeropg doctor` on each node says what is missing");
  const auto found =
      std::find_if(offer.wires.begin(), offer.wires.end(), [&](const WireEntry* wire) { return wire->name == name; });
  TORCH_CHECK_WITH(DistBackendError, found != offer.wires.end(),
                   "the map in the store names a network that this rank did not offer; somebody else writes to it");
  const WireEntry& wire = **found;
  if (found != offer.wires.begin()) {
    notice("network", c10::str(start, "this rank has ", offer.wires.front()->needs,
                               " but not every other one, so bytes between nodes go over ", wire.title,
                               "; `python -m zeropg doctor` on each node says what is missing."));
    return wire;
  }
  for (const auto& [refused, obstacle] : offer.refusals) {
    if (refused->preference < wire.preference) continue;
    const std::string machine = c10::str(start, "this machine has ", refused->needs, " but cannot use it (", obstacle);
    notice("network",
           refused == &wire
               ? c10::str(machine, "), so ", wire.title, " does without it; `python -m zeropg doctor` says what to do.")
               : c10::str(machine, "), so bytes between nodes go over ", wire.title,
                          "; `python -m zeropg doctor` says what to do, BackendOptions(network=\"", wire.name,
                          "\") that it is meant so."));
  }
  return wire;
}

void join_network(const WireEntry& wire, const NetworkPlan& plan, StoreExchange& store_exchange,
                  std::unique_ptr<RemoteTransport>* network) {
  StoreOutOfBand out_of_band(wire, plan, store_exchange);
  std::unique_ptr<Wire> joined = wire.join({.rank = plan.rank,
                                            .world_size = plan.world_size,
                                            .peers = plan.peers,
                                            .library_root = plan.library_root,
                                            .authenticates_frames = plan.authenticates_frames,
                                            .connects_on_demand = plan.connects_on_demand},
                                           out_of_band);
  // Peers that this rank has answered may go on while it still waits for others. Should it fail here, they hear why.
  *network = std::make_unique<RemoteTransport>(
      std::move(joined),
      RemoteTransportOptions{
          .rank = plan.rank, .world_size = plan.world_size, .peers = plan.peers, .window_bytes = plan.window_bytes});
  greet_and_wait(**network, plan.first_met, plan.deadline, plan.tick);
}

}  // namespace zeropg

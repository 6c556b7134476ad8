#include "backend/transport/network/registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "backend/transport/network/tcp_wire.h"
#include "backend/transport/network/ucx_wire.h"

namespace zeropg {
namespace {

constexpr WireEntry kWires[] = {
    {"tcp", "TCP", 0, "", "", probe_tcp, join_tcp},
    {"ucx", "UCX", 1, "RDMA", "libucx", probe_ucx, join_ucx},
};

constexpr std::string_view kAll = "all";
constexpr std::string_view kOnDemand = "on_demand";
// In larger groups most pairs of ranks never talk: each would cost a descriptor and the kernel's buffers.
constexpr int32_t kMostConnectedRanks = 128;

std::vector<const WireEntry*> by_preference() {
  std::vector<const WireEntry*> sorted;
  for (const WireEntry& wire : kWires) sorted.push_back(&wire);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const WireEntry* a, const WireEntry* b) { return a->preference > b->preference; });
  return sorted;
}

}  // namespace

std::span<const WireEntry> wires() { return kWires; }

void check_network(std::string_view network) {
  bool is_known = network == kAutomaticNetwork;
  std::string known(kAutomaticNetwork);
  for (const WireEntry& wire : kWires) {
    is_known = is_known || network == wire.name;
    known.append(&wire == std::end(kWires) - 1 ? " or " : ", ").append(wire.name);
  }
  TORCH_CHECK_VALUE(is_known, "[zeropg] BackendOptions: network is '", network, "', expected ", known, ".");
}

void check_connections(std::string_view connections) {
  TORCH_CHECK_VALUE(connections == kAutomaticConnections || connections == kAll || connections == kOnDemand,
                    "[zeropg] BackendOptions: connections is '", connections, "', expected automatic, all or on_demand",
                    " (ZEROPG_CONNECTIONS is used where it is automatic).");
}

bool connects_on_demand(std::string_view connections, int32_t world_size) {
  return connections == kAutomaticConnections ? world_size > kMostConnectedRanks : connections == kOnDemand;
}

std::vector<std::string> WireOffer::names() const {
  std::vector<std::string> names;
  for (const WireEntry* wire : wires) names.emplace_back(wire->name);
  return names;
}

WireOffer offer_wires(std::string_view network, const std::string& library_root) {
  WireOffer offer;
  for (const WireEntry* wire : by_preference()) {
    const bool is_insisted_on = wire->name == network;
    if (!is_insisted_on && network != kAutomaticNetwork) continue;
    WireProbe probe = wire->probe(library_root);
    if (probe.is_viable || is_insisted_on) offer.wires.push_back(wire);
    if (!probe.obstacle.empty()) offer.refusals.push_back({wire, std::move(probe.obstacle)});
  }
  return offer;
}

const WireEntry* common_wire(std::span<const std::vector<std::string>> offers) {
  for (const WireEntry* wire : by_preference()) {
    const bool have_all = std::all_of(offers.begin(), offers.end(), [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), wire->name) != names.end();
    });
    if (have_all) return wire;
  }
  return nullptr;
}

}  // namespace zeropg

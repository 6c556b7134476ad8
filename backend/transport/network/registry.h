// Every wire between nodes, and the choice between them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/transport/network/wire.h"
#include "backend/transport/network/wire_setup.h"

namespace zeropg {

struct WireEntry {
  std::string_view name;   // as in BackendOptions(network=...)
  std::string_view title;  // in prose
  int preference = 0;      // of the wires that all ranks have the highest is used, unless the user names one
  std::string_view needs;  // what a machine must have for it, in prose; empty: nothing
  std::string_view wheel;  // the Python package that may bring its library; empty: it loads none
  WireProbe (*probe)(const std::string& library_root) = nullptr;
  // Collective over the peers.
  std::unique_ptr<Wire> (*join)(const WireOptions& options, OutOfBand& out_of_band) = nullptr;
};

std::span<const WireEntry> wires();

// What a user may ask for beside a wire's name.
constexpr std::string_view kAutomaticNetwork = "automatic";

// ValueError unless `network` is one of both.
void check_network(std::string_view network);

// When ranks of several nodes connect: "all" with all others as the group is made, "on_demand" with each as soon as one
// has something for the other, or "automatic".
constexpr std::string_view kAutomaticConnections = "automatic";

// ValueError unless `connections` is one of these.
void check_connections(std::string_view connections);

bool connects_on_demand(std::string_view connections, int32_t world_size);

// What a rank whose user asks for `network` can use.
struct WireOffer {
  struct Refusal {
    const WireEntry* wire = nullptr;
    std::string obstacle;
  };
  std::vector<const WireEntry*> wires;  // the preferred one first
  std::vector<Refusal> refusals;  // of machines that seem made for a wire; what the user insists on is also offered

  std::vector<std::string> names() const;
};
WireOffer offer_wires(std::string_view network, const std::string& library_root);

// The wire to use where each rank offers those of these names: the preferred one of those that all have; nullptr: they
// have none in common. Whatever the names are.
const WireEntry* common_wire(std::span<const std::vector<std::string>> offers);

}  // namespace zeropg

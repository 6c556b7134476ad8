// The way to the ranks of other nodes: which wire all of them can use, and how they find each other over it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/bootstrap/store_exchange.h"
#include "backend/topology/network_rules.h"
#include "backend/transport/network/registry.h"
#include "backend/transport/network/remote_transport.h"

namespace zeropg {

struct NetworkPlan {
  int32_t rank = 0;
  int32_t world_size = 1;
  std::vector<int32_t> peers;      // those on other nodes
  std::vector<int32_t> first_met;  // of these, those that answer before the group is there
  int64_t window_bytes = 0;
  std::string group;  // a name that no other group has
  std::string key;    // proves membership
  InterfaceRules interfaces;
  PortRange ports;
  std::string library_root;  // see WireOptions, as the next
  bool authenticates_frames = false;
  bool connects_on_demand = false;  // with those that are not met first
  Clock::time_point deadline;
  Tick tick;
};

// The wire that the map in the store names. DistBackendError where this rank did not offer it: the map is not signed,
// and there are wires whose ports parse bytes before these are proven. Tells the user, once, of a better one that
// cannot be used.
const WireEntry& chosen_wire(const std::string& name, const WireOffer& offer, int32_t rank, int32_t world_size);

// Collective over the ranks of several nodes. `network` is set as soon as peers may hear from this rank, and stays so
// where this throws.
void join_network(const WireEntry& wire, const NetworkPlan& plan, StoreExchange& store_exchange,
                  std::unique_ptr<RemoteTransport>* network);

}  // namespace zeropg

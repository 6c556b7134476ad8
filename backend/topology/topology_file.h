// The topology file: which hosts stand in which rack, and what the links carry. JSON:
//
//   {"racks": [{"name": "a", "hosts": ["n1", "n2"], "node_gbps": 1.25, "uplink_gbps": 0.5}, {"name": "b", "nodes": 8}]}
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/topology/topology.h"

namespace zeropg {

struct Rack {
  std::string name;
  std::string pod;                 // empty: none
  std::vector<std::string> hosts;  // empty: only their number is known
  int64_t nodes = 0;
  double node_gbps = 0;    // of each node's link, in 1e9 bytes/s; 0: nothing is said
  double uplink_gbps = 0;  // of the rack's way to other racks, likewise
};

// Throws std::invalid_argument, with the rack's name, where `json` is no topology file or contradicts itself.
std::vector<Rack> parse_racks(std::string_view json);

struct TopologyFile {
  std::string text;
  std::vector<Rack> racks;
};

// Throws std::invalid_argument, with the path, where it cannot be read, and as parse_racks does.
TopologyFile read_topology_file(const std::string& path);

// What the file says of the links of a group: of nodes, or of racks, where it says something of all of them.
LinkModel declared_links(const Topology& topology, const std::vector<Rack>& racks);

// The rack in which `host` is named; null: none.
const Rack* find_rack(const std::vector<Rack>& racks, std::string_view host);

}  // namespace zeropg

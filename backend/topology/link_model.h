// What the links between nodes carry, and how that is found out from what flowed: while all nodes sent at once, and
// later in a group's own operations.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zeropg {

struct LinkModel {
  std::vector<double> node_bytes_per_us{};    // of each node's link, either way; empty: not known
  std::vector<double> uplink_bytes_per_us{};  // of each rack's way to other racks; empty: none is known to be a limit
  bool is_followed = false;                   // whether nodes' speeds are kept current: Note [Links that change]

  bool operator==(const LinkModel&) const = default;
};

// The same by names, for groups of other ranks on the same nodes.
struct KnownLinks {
  std::map<std::string, double> of_host{};  // by host id
  std::map<std::string, double> of_rack{};  // by rack id
};

// The nodes that each node sends to while links are measured, as distances around the ring of nodes: all others in
// small groups, at most eight in large ones.
std::vector<int32_t> probe_distances(int32_t nodes);

// What node `to` received from node `from` in each window of the measurement; all windows have the same length.
struct Flow {
  int32_t from = 0;
  int32_t to = 0;
  std::vector<double> bytes_per_us{};
};

// Note [Which links differ]
// What a link carries in a window of some milliseconds varies: a token bucket gives what it saved, a processor does
// something else. A share that follows such noise would make collectives slower. So two nodes are told apart only where
// the slower one, in all windows but its best, stayed a fifth below what the faster one had in half of its windows.
// Nodes that are not told apart get one figure, with two digits.
//
// A node whose thread hardly slept meanwhile moved what its processor could, which says nothing about its link: it
// counts as fast as the fastest.
//
// A node seems no faster than what the others together exchange with it: of three nodes, a fast one between two slow
// ones seems slow.

// What all nodes together saw.
struct LinkMeasurement {
  std::vector<Flow> flows{};
  std::vector<double> busy{};  // of each node: the part of the time in which its thread wanted a processor; empty: none
};

// `racks`: nodes of each rack, or empty. An uplink counts as a limit where flows between racks are told apart, in the
// same way, from those inside.
LinkModel model_links(int32_t nodes, const std::vector<std::vector<int32_t>>& racks, const LinkMeasurement& measured);

// Note [Links that change]
// What flows in a group's large operations says again and again what the nodes' links carry (engine/link_watch.h), by
// the same rules as the measurement. As long as every node is as fast as it was in proportion to the fastest one, to a
// fifth, all figures stay as they are, so that noise changes none. Otherwise all of them are taken anew.

// What the link of each node carried in one window, to all other nodes and from all others.
struct LinkTraffic {
  std::vector<double> out_bytes_per_us{};
  std::vector<double> in_bytes_per_us{};
};
inline constexpr size_t kFollowedWindows = 6;

// `recent`: the last windows, all of the same nodes; fewer than kFollowedWindows change nothing. Uplinks stay.
LinkModel follow_links(const LinkModel& before, const std::vector<LinkTraffic>& recent);

}  // namespace zeropg

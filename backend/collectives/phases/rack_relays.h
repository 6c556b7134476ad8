// Who passes on, in each rack, what a node of another rack sends to all of it, or what all of it sends to that node:
// one node of the rack, so that the uplinks carry it once. The nodes of a rack take turns, so that each relays as much
// as another.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/phases/internode_phases.h"
#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"

namespace zeropg {

class RackRelays {
 public:
  // Throws std::invalid_argument where the racks do not hold every node once.
  RackRelays(const CollectiveSpec& spec, int32_t node);

  int32_t rack() const { return rack_of_[node_]; }
  int32_t rack_count() const { return static_cast<int32_t>(racks_.size()); }
  const std::vector<int32_t>& nodes() const { return racks_[rack()]; }  // of the own rack, in order
  // The other nodes of the own rack and the other racks, those behind the own one first: if all ranks go this way
  // round, nobody is sent to by all at once.
  const std::vector<int32_t>& near_nodes() const { return near_nodes_; }
  const std::vector<int32_t>& other_racks() const { return other_racks_; }
  // The node of `rack` that relays for `node`, of another rack.
  int32_t relay_for(int32_t node, int32_t rack) const;
  // The nodes of other racks that a node of the own one relays for, in order.
  std::vector<int32_t> relayed_by(int32_t node) const;
  // Who of the own rack has to do with the part of any node: the node itself, or who relays for it.
  int32_t near_end(int32_t node) const { return rack_of_[node] == rack() ? node : relay_for(node, rack()); }
  // The own part and those that this node relays, in the order in which `near` goes through all: from behind its own
  // on, as the groups of a slot do (slot_layout.h).
  std::vector<int32_t> parts_as_seen_by(int32_t near) const;

 private:
  const std::vector<std::vector<int32_t>>& racks_;  // of the specification
  const int32_t node_;
  std::vector<int32_t> rack_of_;
  std::vector<int32_t> place_in_rack_;
  std::vector<int32_t> near_nodes_;
  std::vector<int32_t> other_racks_;
};

// By node: for how many others it relays, and how many ranks these have. Empty where there are no racks.
struct RelayLoad {
  int32_t nodes = 0;
  int32_t ranks = 0;
};
std::vector<RelayLoad> relay_loads(const CollectiveSpec& spec);
int32_t most_relayed(const CollectiveSpec& spec);  // nodes, by one node

// Sizes of collectives of blocks over racks. A pair of ranks exchanges in each chunk what one of their nodes relays
// beside its own part, so two chunks of that fit the window.
bool can_relay_blocks(const CollectiveSpec& spec);
BlockPieces cut_relayed_blocks(const CollectiveSpec& spec);

// Of an all-gather; of a reduce-scatter, whose messages go the other way, likewise.
LinkBytes bytes_of_relayed_blocks(const CollectiveSpec& spec);
// Sent plus received by the busiest node's ranks, each, for one chunk.
double messages_of_relayed_blocks(const CollectiveSpec& spec);

}  // namespace zeropg

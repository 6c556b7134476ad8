#include "backend/collectives/phases/rack_relays.h"

#include <algorithm>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int32_t kChunksUnderWay = 2;

int32_t messages_under_way(const CollectiveSpec& spec) {
  // A part has a piece for each rank of its node, and at least the ranks of the larger of two nodes share it.
  const int32_t pieces = (largest_node_size(spec) - 1) / second_smallest_node_size(spec) + 1;
  return kChunksUnderWay * (1 + most_relayed(spec)) * pieces;
}

}  // namespace

RackRelays::RackRelays(const CollectiveSpec& spec, int32_t node)
    : racks_(spec.racks), node_(node), rack_of_(rack_of_nodes(spec)), place_in_rack_(spec.nodes.size()) {
  for (const std::vector<int32_t>& rack : racks_) {
    for (size_t place = 0; place < rack.size(); ++place) place_in_rack_[rack[place]] = static_cast<int32_t>(place);
  }
  near_nodes_ = nodes();
  std::rotate(near_nodes_.begin(), near_nodes_.begin() + place_in_rack_[node_], near_nodes_.end());
  near_nodes_.erase(near_nodes_.begin());
  for (int32_t distance = 1; distance < rack_count(); ++distance) {
    other_racks_.push_back((rack() + distance) % rack_count());
  }
}

int32_t RackRelays::relay_for(int32_t node, int32_t rack) const {
  const std::vector<int32_t>& nodes = racks_[rack];
  return nodes[static_cast<size_t>(place_in_rack_[node] + rack_of_[node]) % nodes.size()];
}

std::vector<int32_t> RackRelays::relayed_by(int32_t node) const {
  std::vector<int32_t> relayed;
  for (int32_t other = 0; other < static_cast<int32_t>(rack_of_.size()); ++other) {
    if (rack_of_[other] != rack() && relay_for(other, rack()) == node) relayed.push_back(other);
  }
  return relayed;
}

std::vector<int32_t> RackRelays::parts_as_seen_by(int32_t near) const {
  const auto nodes = static_cast<int32_t>(rack_of_.size());
  std::vector<int32_t> parts = relayed_by(node_);
  parts.push_back(node_);
  std::ranges::sort(parts, {}, [&](int32_t part) { return (part - near - 1 + nodes) % nodes; });
  return parts;
}

std::vector<RelayLoad> relay_loads(const CollectiveSpec& spec) {
  std::vector<RelayLoad> loads(spec.racks.empty() ? 0 : spec.nodes.size());
  for (size_t rack = 0; rack < spec.racks.size(); ++rack) {
    const RackRelays relays(spec, spec.racks[rack].front());
    for (const int32_t other : relays.other_racks()) {
      for (const int32_t node : spec.racks[other]) {
        RelayLoad& load = loads[relays.relay_for(node, static_cast<int32_t>(rack))];
        load.nodes += 1;
        load.ranks += static_cast<int32_t>(spec.nodes[node].size());
      }
    }
  }
  return loads;
}

int32_t most_relayed(const CollectiveSpec& spec) {
  int32_t most = 0;
  for (const RelayLoad& load : relay_loads(spec)) most = std::max(most, load.nodes);
  return most;
}

bool can_relay_blocks(const CollectiveSpec& spec) {
  return spec.racks.size() > 1 && spec.codec == nullptr && spec.window_bytes > 0 &&
         can_exchange(spec, spec.world_size, messages_under_way(spec));
}

BlockPieces cut_relayed_blocks(const CollectiveSpec& spec) { return cut_blocks(spec, messages_under_way(spec)); }

LinkBytes bytes_of_relayed_blocks(const CollectiveSpec& spec) {
  const auto block = static_cast<double>(spec.bytes);
  const double other_racks = static_cast<double>(spec.racks.size()) - 1;
  const std::vector<RelayLoad> loads = relay_loads(spec);
  LinkBytes bytes{.of_nodes = std::vector<double>(spec.nodes.size()), .of_uplinks = {}};
  for (const std::vector<int32_t>& rack : spec.racks) {
    const double near = static_cast<double>(rack.size()) - 1;
    double ranks = 0;
    for (const int32_t node : rack) {
      const auto own = static_cast<double>(spec.nodes[node].size());
      const double sent = own * (near + other_racks) + loads[node].ranks * near;
      bytes.of_nodes[node] = std::max(sent, spec.world_size - own) * block;
      ranks += own;
    }
    bytes.of_uplinks.push_back(std::max(ranks * other_racks, spec.world_size - ranks) * block);
  }
  return bytes;
}

double messages_of_relayed_blocks(const CollectiveSpec& spec) {
  const std::vector<RelayLoad> loads = relay_loads(spec);
  const double other_racks = static_cast<double>(spec.racks.size()) - 1;
  double most = 0;
  for (const std::vector<int32_t>& rack : spec.racks) {
    const double near = static_cast<double>(rack.size()) - 1;
    for (const int32_t node : rack) most = std::max(most, near + other_racks + loads[node].nodes * near);
  }
  return most + static_cast<double>(spec.nodes.size()) - 1;
}

}  // namespace zeropg

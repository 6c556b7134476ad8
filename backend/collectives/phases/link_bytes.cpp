#include "backend/collectives/phases/link_bytes.h"

#include <algorithm>

namespace zeropg {

LinkBytes bytes_of_exchange(const CollectiveSpec& spec, const std::vector<double>& shares) {
  const auto nodes = static_cast<double>(shares.size());
  const auto bytes = static_cast<double>(spec.bytes);
  LinkBytes result;
  for (const double share : shares) result.of_nodes.push_back((1 + (nodes - 2) * share) * bytes);
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto near = static_cast<double>(rack.size());
    double share = 0;
    for (const int32_t node : rack) share += shares[node];
    result.of_uplinks.push_back((near * (1 - share) + (nodes - near) * share) * bytes);
  }
  return result;
}

LinkBytes bytes_to_all_nodes(const CollectiveSpec& spec) {
  const auto nodes = static_cast<double>(spec.nodes.size());
  const auto bytes = static_cast<double>(spec.bytes);
  LinkBytes result{.of_nodes = std::vector<double>(spec.nodes.size(), (nodes - 1) * bytes)};
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto near = static_cast<double>(rack.size());
    result.of_uplinks.push_back(near * (nodes - near) * bytes);
  }
  return result;
}

LinkBytes bytes_of_blocks(const CollectiveSpec& spec) {
  const auto nodes = static_cast<double>(spec.nodes.size());
  const auto block = static_cast<double>(spec.bytes);
  const double ranks = spec.world_size;
  LinkBytes result;
  for (const std::vector<int32_t>& node : spec.nodes) {
    const auto own = static_cast<double>(node.size());
    result.of_nodes.push_back(std::max(own * (nodes - 1), ranks - own) * block);
  }
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto near = static_cast<double>(rack.size());
    double own = 0;
    for (const int32_t node : rack) own += static_cast<double>(spec.nodes[node].size());
    result.of_uplinks.push_back(std::max(own * (nodes - near), (ranks - own) * near) * block);
  }
  return result;
}

}  // namespace zeropg

#include "backend/collectives/phases/link_bytes.h"

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

}  // namespace zeropg

#include "backend/topology.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

namespace zeropg {

Topology make_topology(std::vector<std::string> host_ids, int32_t rank) {
  Topology topology;
  topology.host_ids = std::move(host_ids);
  topology.rank = rank;
  std::map<std::string, int32_t> node_of_host;
  for (int32_t r = 0; r < topology.world_size(); ++r) {
    const auto [entry, is_new] = node_of_host.try_emplace(topology.host_ids[r], topology.node_count());
    if (is_new) topology.nodes.emplace_back();
    std::vector<int32_t>& node = topology.nodes[entry->second];
    topology.node_rank.push_back(entry->second);
    topology.local_rank.push_back(static_cast<int32_t>(node.size()));
    node.push_back(r);
  }
  return topology;
}

std::string to_table(const Topology& topology) {
  size_t width = 4;  // "host"
  for (const std::string& host : topology.host_ids) width = std::max(width, host.size());
  std::ostringstream table;
  const auto row = [&](const std::string& node, const std::string& host, const std::string& ranks) {
    table << node << std::string(6 - std::min<size_t>(5, node.size()), ' ') << host
          << std::string(width + 2 - host.size(), ' ') << ranks << '\n';
  };
  row("node", "host", "ranks");
  for (int32_t node = 0; node < topology.node_count(); ++node) {
    std::string ranks;
    for (const int32_t rank : topology.nodes[node]) {
      ranks.append(ranks.empty() ? "" : " ").append(std::to_string(rank)).append(rank == topology.rank ? "*" : "");
    }
    row(std::to_string(node), topology.host_ids[topology.nodes[node].front()], ranks);
  }
  return table.str();
}

}  // namespace zeropg

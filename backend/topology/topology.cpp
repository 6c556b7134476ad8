#include "backend/topology/topology.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

namespace zeropg {

namespace {

using Ranks = std::vector<int32_t>;

std::vector<Ranks> domains_of(const Ranks& node, const std::vector<std::string>& domain_ids) {
  std::vector<Ranks> domains;
  std::map<std::string, size_t> domain_of_id;
  for (const int32_t rank : node) {
    if (domain_ids[rank].empty()) return {};
    const auto [entry, is_new] = domain_of_id.try_emplace(domain_ids[rank], domains.size());
    if (is_new) domains.emplace_back();
    domains[entry->second].push_back(rank);
  }
  return domains;
}

}  // namespace

Topology make_topology(std::vector<std::string> host_ids, const std::vector<std::string>& domain_ids, int32_t rank) {
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
  for (const Ranks& node : topology.nodes) topology.domains.push_back(domains_of(node, domain_ids));
  return topology;
}

std::vector<int32_t> Topology::own_ranks(std::vector<int32_t> places) const {
  for (int32_t& place : places) place = own_node()[place];
  return places;
}

std::vector<int32_t> Topology::others_than(int32_t peer) const {
  Ranks ranks(host_ids.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::erase(ranks, peer);
  return ranks;
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
    const auto append = [&](int32_t rank) {
      ranks.append(ranks.empty() ? "" : " ").append(std::to_string(rank)).append(rank == topology.rank ? "*" : "");
    };
    const std::vector<Ranks>& domains = topology.domains[node];
    for (const Ranks& domain : domains.empty() ? std::vector<Ranks>{topology.nodes[node]} : domains) {
      ranks.append(ranks.empty() ? "" : " |");
      for (const int32_t rank : domain) append(rank);
    }
    row(std::to_string(node), topology.host_ids[topology.nodes[node].front()], ranks);
  }
  return table.str();
}

}  // namespace zeropg

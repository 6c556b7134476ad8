#include "backend/topology/topology.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include "backend/diagnostics/printable.h"

namespace zeropg {

namespace {

using Ranks = std::vector<int32_t>;

constexpr size_t kMostNameBytes = 128;  // in a table; a probed host has about 80

struct Groups {
  std::vector<Ranks> members;    // of each group, by first member
  std::vector<std::string> ids;  // of each group
};

// Those with equal ids; none where a member has no id.
Groups group_by_id(const Ranks& members, const std::function<const std::string&(int32_t)>& id_of) {
  Groups groups;
  std::map<std::string, size_t> group_of_id;
  for (const int32_t member : members) {
    const std::string& id = id_of(member);
    if (id.empty()) return {};
    const auto [entry, is_new] = group_of_id.try_emplace(id, groups.ids.size());
    if (is_new) {
      groups.members.emplace_back();
      groups.ids.push_back(id);
    }
    groups.members[entry->second].push_back(member);
  }
  return groups;
}

Ranks numbers_below(size_t count) {
  Ranks numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace

Topology make_topology(const std::vector<RankPlace>& places, int32_t rank) {
  Topology topology;
  topology.rank = rank;
  std::map<std::string, int32_t> node_of_host;
  for (const RankPlace& place : places) {
    const auto [entry, is_new] = node_of_host.try_emplace(place.host_id, topology.node_count());
    if (is_new) topology.nodes.emplace_back();
    std::vector<int32_t>& node = topology.nodes[entry->second];
    topology.node_rank.push_back(entry->second);
    topology.local_rank.push_back(static_cast<int32_t>(node.size()));
    node.push_back(topology.world_size());
    topology.host_ids.push_back(place.host_id);
  }
  for (const Ranks& node : topology.nodes) {
    const auto domain_of = [&](int32_t r) -> const std::string& { return places[r].domain_id; };
    topology.domains.push_back(group_by_id(node, domain_of).members);
  }
  const auto rack_of = [&](int32_t node) -> const std::string& { return places[topology.nodes[node][0]].rack_id; };
  Groups racks = group_by_id(numbers_below(topology.nodes.size()), rack_of);
  topology.racks = std::move(racks.members);
  topology.rack_ids = std::move(racks.ids);
  return topology;
}

KnownLinks known_links(const Topology& topology) {
  KnownLinks known;
  for (size_t node = 0; node < topology.links.node_bytes_per_us.size(); ++node) {
    known.of_host[topology.host_ids[topology.nodes[node][0]]] = topology.links.node_bytes_per_us[node];
  }
  for (size_t rack = 0; rack < topology.links.uplink_bytes_per_us.size(); ++rack) {
    known.of_rack[topology.rack_ids[rack]] = topology.links.uplink_bytes_per_us[rack];
  }
  return known;
}

LinkModel links_of(const Topology& topology, const KnownLinks& known) {
  const auto speeds = [](const std::map<std::string, double>& known_speeds, const std::vector<std::string>& ids) {
    std::vector<double> found;
    for (const std::string& id : ids) {
      const auto entry = known_speeds.find(id);
      if (entry == known_speeds.end()) return std::vector<double>();
      found.push_back(entry->second);
    }
    return found;
  };
  std::vector<std::string> hosts;
  for (const Ranks& node : topology.nodes) hosts.push_back(topology.host_ids[node[0]]);
  return {.node_bytes_per_us = speeds(known.of_host, hosts),
          .uplink_bytes_per_us = speeds(known.of_rack, topology.rack_ids)};
}

std::vector<int32_t> Topology::own_ranks(std::vector<int32_t> places) const {
  for (int32_t& place : places) place = own_node()[place];
  return places;
}

std::vector<int32_t> Topology::others_than(int32_t peer) const {
  Ranks ranks = numbers_below(host_ids.size());
  std::erase(ranks, peer);
  return ranks;
}

namespace {

// Ranks of a node, by domains where it has several.
std::string ranks_text(const Topology& topology, int32_t node) {
  std::string ranks;
  const std::vector<Ranks>& domains = topology.domains[node];
  for (const Ranks& domain : domains.empty() ? std::vector<Ranks>{topology.nodes[node]} : domains) {
    ranks.append(ranks.empty() ? "" : " |");
    for (const int32_t rank : domain) {
      ranks.append(ranks.empty() ? "" : " ").append(std::to_string(rank)).append(rank == topology.rank ? "*" : "");
    }
  }
  return ranks;
}

std::string gbps_text(double bytes_per_us) {
  std::ostringstream text;
  text << std::setprecision(2) << bytes_per_us / 1000;
  return text.str();
}

// What its owner has called it, or a peer.
std::string shown(std::string_view name) { return printable(name, kMostNameBytes); }

// The last column is not padded.
std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], row[column].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t column = 0; column + 1 < row.size(); ++column) {
      text.append(row[column]).append(widths[column] + 2 - row[column].size(), ' ');
    }
    text.append(row.back()).append("\n");
  }
  return text;
}

}  // namespace

std::string to_table(const Topology& topology) {
  const std::vector<double>& speeds = topology.links.node_bytes_per_us;
  std::vector<std::string> rack_of(topology.nodes.size());
  for (size_t rack = 0; rack < topology.racks.size(); ++rack) {
    for (const int32_t node : topology.racks[rack]) rack_of[node] = topology.rack_ids[rack];
  }
  std::vector<std::vector<std::string>> rows{{"node"}};
  if (!topology.racks.empty()) rows[0].emplace_back("rack");
  rows[0].emplace_back("host");
  if (!speeds.empty()) rows[0].emplace_back("GB/s");
  rows[0].emplace_back("ranks");
  for (int32_t node = 0; node < topology.node_count(); ++node) {
    std::vector<std::string>& row = rows.emplace_back(1, std::to_string(node));
    if (!topology.racks.empty()) row.push_back(shown(rack_of[node]));
    row.push_back(shown(topology.host_ids[topology.nodes[node].front()]));
    if (!speeds.empty()) row.push_back(gbps_text(speeds[node]));
    row.push_back(ranks_text(topology, node));
  }
  std::string text = aligned(rows);
  for (size_t rack = 0; rack < topology.links.uplink_bytes_per_us.size(); ++rack) {
    text.append("rack ").append(shown(topology.rack_ids[rack])).append(": ");
    text.append(gbps_text(topology.links.uplink_bytes_per_us[rack])).append(" GB/s to other racks\n");
  }
  return text;
}

}  // namespace zeropg

#include "backend/collectives/schedule/placement.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace zeropg {

Placement::Placement(const CollectiveSpec& spec) : rank_(spec.rank), nodes_(spec.nodes) {
  if (nodes_.empty()) {
    nodes_.emplace_back(spec.world_size);
    std::iota(nodes_[0].begin(), nodes_[0].end(), 0);
  }
  node_of_.assign(spec.world_size, -1);
  local_rank_of_.assign(spec.world_size, -1);
  int32_t placed = 0;
  for (int32_t node = 0; node < node_count(); ++node) {
    for (int32_t local_rank = 0; local_rank < node_size(node); ++local_rank) {
      const int32_t rank = nodes_[node][local_rank];
      if (rank < 0 || rank >= spec.world_size || node_of_[rank] >= 0) {
        throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": rank " + std::to_string(rank) +
                                    " of node " + std::to_string(node) + " is outside the group or on two nodes");
      }
      node_of_[rank] = node;
      local_rank_of_[rank] = local_rank;
      ++placed;
    }
  }
  if (placed != spec.world_size) {
    throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": the nodes have " + std::to_string(placed) +
                                " ranks, expected all " + std::to_string(spec.world_size) + " of the group");
  }
  for (int32_t distance = 1; distance < node_count(); ++distance) {
    other_nodes_.push_back((node() + distance) % node_count());
  }
}

Placement Placement::over_domains(const CollectiveSpec& spec) {
  CollectiveSpec domains = spec;
  domains.nodes = spec.domains;
  return Placement(domains);
}

int32_t node_count(const CollectiveSpec& spec) { return std::max(1, static_cast<int32_t>(spec.nodes.size())); }

void check_shares(const CollectiveSpec& spec) {
  const std::vector<int32_t>& shares = spec.node_shares;
  const bool is_one_each = shares.empty() || shares.size() == spec.nodes.size();
  const int64_t sum = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  const bool has_negative = std::any_of(shares.begin(), shares.end(), [](int32_t share) { return share < 0; });
  if (is_one_each && !has_negative && (shares.empty() || sum == kWholeShare)) return;
  throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": " + std::to_string(shares.size()) +
                              " shares of nodes with the sum " + std::to_string(sum) + ", expected one for each of " +
                              std::to_string(spec.nodes.size()) + " nodes, none negative, with the sum " +
                              std::to_string(kWholeShare));
}

std::vector<double> shares_of_nodes(const CollectiveSpec& spec) {
  const int32_t nodes = node_count(spec);
  if (spec.node_shares.empty()) return std::vector<double>(nodes, 1.0 / nodes);
  check_shares(spec);
  std::vector<double> shares;
  for (const int32_t share : spec.node_shares) shares.push_back(static_cast<double>(share) / kWholeShare);
  return shares;
}

std::vector<int32_t> rack_of_nodes(const CollectiveSpec& spec) {
  std::vector<int32_t> racks(node_count(spec), -1);
  int32_t placed = 0;
  for (size_t rack = 0; rack < spec.racks.size(); ++rack) {
    for (const int32_t node : spec.racks[rack]) {
      if (node < 0 || node >= node_count(spec) || racks[node] >= 0) {
        throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": node " + std::to_string(node) +
                                    " of rack " + std::to_string(rack) + " is outside the group or in two racks");
      }
      racks[node] = static_cast<int32_t>(rack);
      ++placed;
    }
  }
  if (placed != node_count(spec)) {
    throw std::invalid_argument(std::string(traits_of(spec.op).name) + ": the racks have " + std::to_string(placed) +
                                " nodes, expected all " + std::to_string(node_count(spec)) + " of the group");
  }
  return racks;
}

int32_t size_of_root_node(const CollectiveSpec& spec) {
  for (const auto& node : spec.nodes) {
    if (std::find(node.begin(), node.end(), spec.root) != node.end()) return static_cast<int32_t>(node.size());
  }
  return spec.world_size;
}

int32_t smallest_domain_size(const CollectiveSpec& spec) {
  size_t smallest = spec.world_size;
  for (const auto& domain : spec.domains) smallest = std::min(smallest, domain.size());
  return static_cast<int32_t>(smallest);
}

int32_t far_ranks(const CollectiveSpec& spec) { return spec.world_size - smallest_domain_size(spec); }

int32_t largest_node_size(const CollectiveSpec& spec) {
  if (spec.nodes.empty()) return spec.world_size;
  size_t largest = 0;
  for (const auto& node : spec.nodes) largest = std::max(largest, node.size());
  return static_cast<int32_t>(largest);
}

int32_t second_smallest_node_size(const CollectiveSpec& spec) {
  std::vector<int32_t> sizes;
  for (const auto& node : spec.nodes) sizes.push_back(static_cast<int32_t>(node.size()));
  std::sort(sizes.begin(), sizes.end());
  return sizes.size() < 2 ? spec.world_size : sizes[1];
}

}  // namespace zeropg

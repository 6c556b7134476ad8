#include "backend/simulator/simulated_nodes.h"

#include "backend/collectives/schedule/placement.h"

namespace zeropg {

SimulatedNodes::SimulatedNodes(const SimulatorOptions& options) : options_(options) {
  const CollectiveSpec spec{.world_size = options.world_size, .nodes = options.nodes};
  const Placement placement(spec);
  for (int32_t node = 0; node < placement.node_count(); ++node) {
    nodes_.emplace_back();
    for (int32_t i = 0; i < placement.node_size(node); ++i) nodes_.back().push_back(placement.rank_at(node, i));
  }
  for (int32_t rank = 0; rank < options.world_size; ++rank) node_of_.push_back(placement.node_of(rank));
}

SimulatedLink SimulatedNodes::link(int32_t from, int32_t to) const {
  if (options_.link) return options_.link(from, to);
  if (is_near(from, to)) return {};
  const auto ranks = static_cast<double>(ranks_beside(from).size());
  const auto peers = static_cast<double>(ranks_beside(to).size());
  return {.latency_us = options_.model.hop_us,
          .sender_bytes_per_us = options_.model.network_bytes_per_us / ranks,
          .receiver_bytes_per_us = options_.model.network_bytes_per_us / peers};
}

}  // namespace zeropg

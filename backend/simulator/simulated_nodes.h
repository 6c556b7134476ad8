// Which ranks of a simulated group share a node, and what lies between any two. For the parts of schedule_simulator.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/simulator/schedule_simulator.h"

namespace zeropg {

class SimulatedNodes {
 public:
  // `options` must outlive it. Throws std::invalid_argument where a rank is not on exactly one node.
  explicit SimulatedNodes(const SimulatorOptions& options);

  int32_t count() const { return static_cast<int32_t>(nodes_.size()); }
  int32_t node_of(int32_t rank) const { return node_of_[rank]; }
  const std::vector<int32_t>& ranks_beside(int32_t rank) const { return nodes_[node_of_[rank]]; }  // and itself
  bool is_near(int32_t rank, int32_t peer) const { return node_of_[rank] == node_of_[peer]; }

  // Bytes that may be sent and not yet received.
  int64_t capacity(int32_t from, int32_t to) const {
    return is_near(from, to) ? options_.mailbox_bytes : options_.window_bytes;
  }
  SimulatedLink link(int32_t from, int32_t to) const;

 private:
  const SimulatorOptions& options_;
  std::vector<std::vector<int32_t>> nodes_;
  std::vector<int32_t> node_of_;
};

}  // namespace zeropg

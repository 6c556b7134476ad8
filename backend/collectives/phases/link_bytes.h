// What the exchanges between nodes (internode_phases.h) bring to the links of nodes and racks.
#pragma once

#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/collective_spec.h"

namespace zeropg {

// Every node completes its share of CollectiveSpec::bytes for all: partial sums there, results back.
LinkBytes bytes_of_exchange(const CollectiveSpec& spec, const std::vector<double>& shares);
// Every node sends all of them to all nodes.
LinkBytes bytes_to_all_nodes(const CollectiveSpec& spec);
// Of an all-gather: every rank sends them to all other nodes. Of a reduce-scatter they come the other way.
LinkBytes bytes_of_blocks(const CollectiveSpec& spec);

}  // namespace zeropg

// How much of an all-reduce each node should complete where the links of nodes differ.
//
// In the direct exchange among m nodes, node j sends the partial sums of what others complete, and what it completes
// itself to m - 1 nodes: (1 + (m - 2) f_j) times the bytes, if it completes the share f_j; it receives as much. So a
// slow link is relieved by a small share, down to once the bytes. The shares are those that make the slowest link's
// time the shortest, found by filling: of the links that have a share at all, each takes equally long.
// Method: BytePS (Jiang et al., OSDI 2020), theorem 1, for hosts that are nodes themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/select/select.h"

namespace zeropg {

// By node, in 1/kWholeShare, as in CollectiveSpec::node_shares: empty where equal shares serve as well, since the links
// are within a tenth of each other, or since there are two nodes, each of which sends everything once anyhow. Pure.
// `model` has a positive speed for each node, or for none.
std::vector<int32_t> node_shares(const CostModel& model, const std::vector<std::vector<int32_t>>& nodes);

}  // namespace zeropg

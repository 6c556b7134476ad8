// The choice of an algorithm: a pure function of what is the same on all ranks.
#pragma once

#include <string_view>
#include <vector>

#include "backend/collectives/select/registry.h"

namespace zeropg {

// The alpha-beta model of a node and of the links between nodes. All ranks of a group must use the same one.
struct CostModel {
  double barrier_us = 2;         // an uncontended barrier with a yield or two in it
  double bytes_per_us = 20'000;  // copy speed of one core in the cache, read plus written
  // What bytes of other domains cost beyond that, while all ranks want them: if a socket's way to another one carries
  // 50 to 100 GB/s, for 8 to 32 ranks. An estimate: nobody has measured it on such a machine yet.
  double far_bytes_per_us = 5'000;
  double hop_us = 30;                   // a small message to another node through the kernel's TCP, with a wake-up
  double network_bytes_per_us = 1'250;  // 10 Gb/s
  // CPU time of a small message between nodes, of both its ends together; half of it each. Measured with the kernel's
  // TCP on two cores that four ranks shared.
  double message_us = 27;
  std::vector<double> node_bytes_per_us{};    // each node's link, either way; empty: network_bytes_per_us for all
  std::vector<double> uplink_bytes_per_us{};  // of each rack, to all others; empty: no limit
};

double estimate_us(const Cost& cost, const CostModel& model);

// The cheapest algorithm of the operation that supports `spec` wherever its tensors lie (Algorithm::has_own_order says
// which speeds of links count), or `forced` where that is one
// of this operation (a name of another operation is not meant for this one and changes nothing, nor does that of a
// direct one, which needs more than `spec` tells). Throws std::invalid_argument when `forced` is unknown (the message
// lists the known names) or does not support `spec`, or when no algorithm supports it.
const Algorithm& select_algorithm(const CollectiveSpec& spec, std::string_view forced = {},
                                  const CostModel& model = {});

// The direct algorithm (direct.h) for `spec` where it is forced, or where it is cheaper than what select_algorithm
// gives and nothing is forced; nullptr: none. Throws as select_algorithm does.
const Algorithm* select_direct_algorithm(const CollectiveSpec& spec, std::string_view forced = {},
                                         const CostModel& model = {});

}  // namespace zeropg

// What a collective will take on a group that need not exist: its time on an alpha-beta model and the bytes on each
// link.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/select/select.h"

namespace zeropg {

struct EstimateRequest {
  OpKind op = OpKind::kAllReduce;
  int64_t bytes = 0;  // of one block, as in CollectiveSpec; all_to_all: from each rank to each other one
  int32_t element_bytes = 4;
  int32_t root = 0;
  std::vector<std::vector<int32_t>> nodes{};  // ranks of each node; every rank of 0 to n - 1 on one
  std::string algorithm{};                    // empty: the one that is chosen for this specification and model
  CostModel model{};
  std::vector<std::vector<int32_t>> racks{};  // as in CollectiveSpec; nodes complete shares by the model's links
  int64_t bank_bytes = int64_t{1} << 20;      // these three as in BackendOptions
  int64_t mailbox_bytes = int64_t{256} << 10;
  int64_t window_bytes = int64_t{4} << 20;
};

struct Estimate {
  std::string algorithm;
  double time_us = 0;  // until the last rank is done
  bool is_simulated =
      false;               // false: too many steps to simulate, the time is the cost formula's and links are not known
  bool is_chosen = false;  // a group of this specification and model would choose it
  std::vector<std::vector<int64_t>> link_bytes;  // from each node to each other one
};

// Pure; takes up to some seconds. Throws std::invalid_argument for an unknown or unsupported algorithm, a placement
// that is not one, link speeds that fit neither nodes nor racks, or sizes that are negative or cut elements.
Estimate estimate(const EstimateRequest& request);

}  // namespace zeropg

// Every way to make units whole, and the choice between them.
#pragma once

#include <memory>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/fetch/fetch.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"

namespace zeropg {

// Each returns null where it does not serve this stage or this group. Collective. `communicator` must outlive the
// fetch.

// Stages 0 to 2: every rank keeps the whole.
std::unique_ptr<Fetch> make_replicated_fetch(Communicator& communicator, const ShardingOptions& options,
                                             const std::vector<FlatParameter*>& flats);
// Stage 3, all ranks in one node on zeropg: one copy for the node, which any rank reads in any order.
std::unique_ptr<Fetch> make_shared_fetch(Communicator& communicator, const ShardingOptions& options,
                                         const std::vector<FlatParameter*>& flats);
// Stage 3 on any group: all-gather, by all ranks in the same order; into one copy for each node where its ranks can
// share memory.
std::unique_ptr<Fetch> make_gathered_fetch(Communicator& communicator, const ShardingOptions& options,
                                           const std::vector<FlatParameter*>& flats);

// The first of the registry that serves. Collective; all ranks choose the same.
std::unique_ptr<Fetch> make_fetch(Communicator& communicator, const ShardingOptions& options,
                                  const std::vector<FlatParameter*>& flats);

}  // namespace zeropg

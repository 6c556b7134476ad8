// How a model is taken over by its units.
#pragma once

#include "sharding/comm/communicate.h"
#include "sharding/fetch/fetch.h"
#include "sharding/parameters/write_ledger.h"
#include "sharding/units/model_source.h"
#include "sharding/units/units.h"

namespace zeropg {

// Takes over all parameters, one unit after the other, and gives them rank 0's values and a home, so that no more than
// one unit is in memory twice. They are left sharded. Collective; called once.
void adopt(const ModelSource& source, Communicator& communicator, Units& units, Fetch& fetch, WriteLedger& ledger);

}  // namespace zeropg

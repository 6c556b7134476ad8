// What of a model is in this rank's memory.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "sharding/fetch/fetch.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/parameters/options.h"
#include "sharding/units/units.h"

namespace zeropg {

// Bytes by class: parameters, masters, gathered units, gradients, buckets of the reducer, residuals of compression;
// with offload also what is in the tier, and the staging buffers.
std::map<std::string, int64_t> memory_report(const ShardingOptions& options, const Units& units, const Fetch& fetch,
                                             const GradientReducer& reducer);

}  // namespace zeropg

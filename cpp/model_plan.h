// Which units a libtorch model has and which parameters each holds; and whether all ranks bring the same.
#pragma once

#include <torch/nn/module.h>
#include <zeropg/sharded_core.h>

#include <string>
#include <utility>
#include <vector>

#include "sharding/units/model_source.h"

namespace zeropg {

struct ModelPlan {
  std::vector<UnitSource> sources;                            // the root comes last
  std::vector<std::vector<at::Tensor>> parameters;            // of each
  std::vector<std::pair<ShardedUnitBase*, int64_t>> unit_of;  // the units' hooks and their index in `sources`
};

// Gives every parameter to the innermost ShardedUnit around it, one that several units use to the root. Throws
// ValueError for a root that is no unit, or sharded already, and for a model without parameters.
ModelPlan plan_model(const std::shared_ptr<torch::nn::Module>& root);

// A number that differs, but for chance, where models or options do; never 0.
int64_t fingerprint(const ModelPlan& plan, const torch::nn::Module& root, const FullyShardOptions& options);

}  // namespace zeropg

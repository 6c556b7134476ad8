#include "cpp/model_plan.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>

#include "sharding/parameters/parameter_storage.h"

namespace zeropg {
namespace {

// The innermost unit whose name begins `name`; the root, which comes last, otherwise.
size_t home_of(const std::string& name, const std::map<std::string, size_t>& unit_of_prefix, size_t root) {
  for (size_t end = name.rfind('.'); end != std::string::npos && end > 0; end = name.rfind('.', end - 1)) {
    const auto found = unit_of_prefix.find(name.substr(0, end));
    if (found != unit_of_prefix.end()) {
      return found->second;
    }
  }
  return root;
}

// Whether forwards of some embedding write the rows that they look up.
bool is_renormalized(const at::Tensor& parameter, const torch::nn::Module& root) {
  const auto modules = root.modules();
  return std::any_of(modules.begin(), modules.end(), [&](const auto& child) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(child.get());
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(child.get());
    return (embedding != nullptr && embedding->options.max_norm() && embedding->weight.is_same(parameter)) ||
           (bag != nullptr && bag->options.max_norm() && bag->weight.is_same(parameter));
  });
}

struct Occurrence {
  at::Tensor parameter;
  FlatParameter::Source source;
  std::vector<size_t> homes;  // without repetition
};

void check(const std::vector<Occurrence>& parameters) {
  TORCH_CHECK_VALUE(!parameters.empty(), "[zeropg] FullyShardedModule: the module has no parameters to shard.");
  for (const auto& [parameter, source, homes] : parameters) {
    TORCH_CHECK_VALUE(!is_sharded(parameter), "[zeropg] FullyShardedModule: parameter '", source.names.front(),
                      "' belongs to a sharded model already; shard each model once.");
    TORCH_CHECK_NOT_IMPLEMENTED(!parameter.is_complex(), "[zeropg] FullyShardedModule: parameter '",
                                source.names.front(), "' is complex; train its real view.");
  }
}

}  // namespace

ModelPlan plan_model(const std::shared_ptr<torch::nn::Module>& root) {
  auto* root_unit = dynamic_cast<ShardedUnitBase*>(root.get());
  TORCH_CHECK_VALUE(root_unit != nullptr, "[zeropg] FullyShardedModule: the module is no ShardedUnit.");
  ModelPlan plan;
  std::map<std::string, size_t> unit_of_prefix;
  const auto modules = root->named_modules("", /*include_self=*/false);
  for (const auto& entry : modules) {
    if (auto* unit = dynamic_cast<ShardedUnitBase*>(entry.value().get())) {
      const auto known = std::find_if(plan.unit_of.begin(), plan.unit_of.end(),
                                      [&](const auto& other) { return other.first == unit; });
      if (known != plan.unit_of.end()) {  // one module under two names
        unit_of_prefix[entry.key()] = static_cast<size_t>(known->second);
        continue;
      }
      unit_of_prefix[entry.key()] = plan.sources.size();
      plan.unit_of.emplace_back(unit, static_cast<int64_t>(plan.sources.size()));
      plan.sources.push_back({entry.key(), {}});
    }
  }
  const size_t root_index = plan.sources.size();
  plan.unit_of.emplace_back(root_unit, static_cast<int64_t>(root_index));
  plan.sources.push_back({"", {}});

  std::vector<Occurrence> parameters;
  for (const auto& entry : root->named_parameters()) {
    const size_t home = home_of(entry.key(), unit_of_prefix, root_index);
    auto known = std::find_if(parameters.begin(), parameters.end(),
                              [&](const Occurrence& other) { return other.parameter.is_same(entry.value()); });
    if (known == parameters.end()) {
      const at::Tensor& parameter = entry.value();
      parameters.push_back({parameter,
                            {{entry.key()},
                             parameter.sizes().vec(),
                             parameter.scalar_type(),
                             parameter.requires_grad(),
                             is_renormalized(parameter, *root)},
                            {home}});
      continue;
    }
    known->source.names.push_back(entry.key());
    if (std::find(known->homes.begin(), known->homes.end(), home) == known->homes.end()) {
      known->homes.push_back(home);
    }
  }
  check(parameters);
  plan.parameters.resize(plan.sources.size());
  for (const auto& [parameter, source, homes] : parameters) {
    const size_t home = homes.size() == 1 ? homes.front() : root_index;
    plan.sources[home].parameters.push_back(source);
    plan.parameters[home].push_back(parameter);
  }
  return plan;
}

int64_t fingerprint(const ModelPlan& plan, const torch::nn::Module& root, const FullyShardOptions& options) {
  std::string text = c10::str(options.stage, options.reshard_after_forward, options.param_dtype.has_value(),
                              options.param_dtype.value_or(at::kFloat), options.reduce_dtype.has_value(),
                              options.reduce_dtype.value_or(at::kFloat), options.reduction_group != nullptr);
  text += c10::str(";", options.prefetch_numel, ";", options.keep_numel, ";", options.persistent_numel, ";",
                   options.max_whole_numel.value_or(-1));
  const auto describe = [&](const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype, bool requires_grad) {
    text += c10::str(";", name, sizes, dtype, requires_grad);
  };
  for (const auto& source : plan.sources) {
    text += "|" + source.name;
    for (const auto& parameter : source.parameters) {
      describe(c10::str(parameter.names), parameter.sizes, parameter.dtype, parameter.requires_grad);
    }
  }
  for (const auto& buffer : root.named_buffers()) {
    const at::Tensor& value = buffer.value();
    describe(buffer.key(), value.sizes(), value.scalar_type(), value.requires_grad());
  }
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const char character : text) {
    hash = (hash ^ static_cast<uint8_t>(character)) * 1099511628211ULL;
  }
  return static_cast<int64_t>(hash | 1U);
}

}  // namespace zeropg

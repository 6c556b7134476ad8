#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <zeropg/sharded_core.h>

#include <iostream>
#include <numeric>

#include "cpp/model_plan.h"
#include "sharding/comm/communicate.h"
#include "sharding/module/sharded_module.h"

namespace zeropg {
namespace {

// What c10d's functions want: a group whose only backend serves the device of the module.
c10::intrusive_ptr<c10d::ProcessGroup> as_process_group(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                        c10::DeviceType device) {
  constexpr auto kType = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(device, kType, backend);
  group->setDefaultBackend(kType);
  return group;
}

ShardingOptions to_sharding_options(const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(options.stage >= 0 && options.stage < static_cast<int64_t>(kStages.size()),
                    "[zeropg] FullyShardedModule: stage is ", options.stage, "; expected 0, 1, 2 or 3.");
  for (const auto& dtype : {options.param_dtype, options.reduce_dtype}) {
    TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "[zeropg] FullyShardedModule: got dtype ", *dtype,
                      "; expected a floating dtype such as torch::kBFloat16.");
  }
  const std::pair<const char*, int64_t> numels[] = {{"prefetch_numel", options.prefetch_numel},
                                                    {"keep_numel", options.keep_numel},
                                                    {"persistent_numel", options.persistent_numel},
                                                    {"max_whole_numel", options.max_whole_numel.value_or(0)}};
  for (const auto& [name, numel] : numels) {
    TORCH_CHECK_VALUE(numel >= 0, "[zeropg] FullyShardedModule: ", name, " is ", numel,
                      "; expected a number of elements.");
  }
  TORCH_CHECK_VALUE(options.reshard_after_forward || (options.keep_numel == 0 && !options.max_whole_numel),
                    "[zeropg] FullyShardedModule: keep_numel or max_whole_numel is given with reshard_after_forward = "
                    "false, which keeps every unit whole for its backward; expected one of the two.");
  ShardingOptions result;
  result.limits = {.prefetch_numel = options.prefetch_numel,
                   .keep_numel = options.keep_numel,
                   .persistent_numel = options.persistent_numel,
                   .max_whole_numel = options.max_whole_numel.value_or(UnitLimits().max_whole_numel)};
  result.stage = kStages.at(options.stage);
  result.param_dtype = options.param_dtype;
  result.reduce_dtype = options.reduce_dtype;
  result.reshard_after_forward = options.reshard_after_forward;
  return result;
}

// Every rank's `mine`; collective.
std::vector<int64_t> exchange(Communicator& communicator, int64_t mine, const c10::Device& device) {
  at::Tensor all = at::empty({communicator.world_size()}, at::TensorOptions().dtype(at::kLong).device(device));
  communicator.wait(communicator.all_gather(all, at::full({1}, mine, all.options())));
  all = all.cpu();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

constexpr int64_t kCannotShard = 0;  // in place of a fingerprint

void check_same_on_all_ranks(Communicator& communicator, int64_t mine, const c10::Device& device) {
  const std::vector<int64_t> all = exchange(communicator, mine, device);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK_VALUE(all[rank] == mine, "[zeropg rank ", communicator.rank(), "/", communicator.world_size(),
                      "] FullyShardedModule: rank ", rank,
                      all[rank] == kCannotShard ? " could not shard its model and says why"
                                                : " has another model or other options than this rank",
                      "; expected the same options, units, parameters and buffers on every rank.");
  }
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    return parameter.device();
  }
  return at::kCPU;
}

void say_what_changes_numbers(const ShardedModule& module, const FullyShardOptions& options) {
  const char* own = "their own dtype";
  std::cerr << "[zeropg] stage " << options.stage << " over " << module.communicator().world_size()
            << " ranks: computed in " << (options.param_dtype ? c10::toString(*options.param_dtype) : own)
            << ", gradients averaged in "
            << (options.reduce_dtype ? c10::toString(*options.reduce_dtype) : "the masters' dtype") << "; parameters "
            << module.whole_units().fetch().name() << std::endl;
}

}  // namespace

struct ShardedCore::State {
  // Where the values and the gradient of an update range are.
  struct Place {
    int64_t flat = 0;
    int64_t slot = 0;
    int64_t start = 0;  // elements, in the flat's master
  };

  std::weak_ptr<torch::nn::Module> root;
  FullyShardOptions options;
  std::shared_ptr<ShardedModule> module;
  int64_t root_unit = 0;
  std::vector<UpdateRange> ranges;
  std::vector<Place> places;  // one per range

  std::string context(const char* operation) const { return module->communicator().context(operation); }

  std::shared_ptr<torch::nn::Module> live_root(const char* operation) const {
    auto live = root.lock();
    TORCH_CHECK(live != nullptr, context(operation), "the module has been destroyed; keep it while it is in use.");
    return live;
  }

  void list_update_ranges() {
    for (size_t index = 0; index < module->units().flats().size(); ++index) {
      const FlatParameter& flat = *module->units().flats()[index];
      if (!flat.is_trainable()) {
        continue;
      }
      const size_t first = ranges.size();
      for (size_t slot = 0; slot < flat.slots().size(); ++slot) {
        ranges.push_back({flat.slots()[slot].names.front(), flat.slots()[slot].parameter(), {}});
        places.push_back({static_cast<int64_t>(index), static_cast<int64_t>(slot), 0});
      }
      for (const SlotRange& range : flat.slots_in(flat.master.start, flat.master.start + flat.master.values.numel())) {
        const int64_t start = range.flat_start - flat.master.start;
        ranges[first + range.slot].values = flat.master.values.narrow(0, start, range.stop - range.start);
        places[first + range.slot].start = start;
      }
    }
  }
};

ShardedCore::ShardedCore(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedCore::~ShardedCore() = default;

std::shared_ptr<ShardedCore> ShardedCore::create(const std::shared_ptr<torch::nn::Module>& root,
                                                 const c10::intrusive_ptr<c10d::Backend>& group,
                                                 const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(root != nullptr, "[zeropg] FullyShardedModule: the module is empty.");
  TORCH_CHECK_VALUE(group, "[zeropg] FullyShardedModule: the group is null; expected zeropg::make_process_group(...).");
  const c10::Device device = device_of(*root);
  Communicator communicator(as_process_group(group, device.type()));
  ModelPlan plan;
  ShardingOptions sharding;
  try {
    sharding = to_sharding_options(options);
    plan = plan_model(root);
  } catch (...) {
    exchange(communicator, kCannotShard, device);  // the other ranks must not wait for this one
    throw;
  }
  check_same_on_all_ranks(communicator, fingerprint(plan, *root, options), device);
  at::NoGradGuard no_grad;
  for (at::Tensor& buffer : root->buffers()) {
    at::Tensor whole = buffer.contiguous();
    communicator.wait(communicator.broadcast(whole, /*root=*/0));
    if (!whole.is_alias_of(buffer)) {
      buffer.copy_(whole);
    }
  }

  auto state = std::make_unique<State>();
  state->root = root;
  state->options = options;
  state->root_unit = static_cast<int64_t>(plan.sources.size()) - 1;
  ModelSource source{plan.sources, device, std::vector<int64_t>(plan.sources.size()), [&plan](int64_t unit) {
                       const std::vector<at::Tensor>& plain = plan.parameters.at(unit);
                       return std::vector<ParameterTensors>(plain.begin(), plain.end());
                     }};
  std::iota(source.order.begin(), source.order.end(), 0);
  state->module = ShardedModule::create(source, communicator.groups(),
                                        options.reduction_group
                                            ? RankGroups(as_process_group(options.reduction_group, device.type()))
                                            : communicator.groups(),
                                        sharding);
  state->list_update_ranges();
  if (state->module->communicator().rank() == 0) {
    say_what_changes_numbers(*state->module, options);
  }
  auto core = std::shared_ptr<ShardedCore>(new ShardedCore(std::move(state)));
  for (const auto& [unit, index] : plan.unit_of) {
    unit->core_ = core;
    unit->unit_ = index;
  }
  return core;
}

// --- forward ---

void ShardedCore::before_forward(int64_t unit, const std::vector<at::Tensor*>& inputs) {
  if (unit == state_->root_unit) {
    const std::vector<std::string> changed = state_->module->changed_parameters();
    TORCH_CHECK(
        changed.empty(), state_->context("forward"), "'", changed.front(), "' and ", changed.size() - 1,
        " other parameters changed after FullyShardedModule was made (replaced, moved or cast); make such changes "
        "before, or set values in full_parameters(body, /*writable=*/true).");
  }
  std::vector<at::Tensor> tensors;
  for (at::Tensor* input : inputs) {
    if (unit == state_->root_unit && state_->options.param_dtype && input->is_floating_point()) {
      *input = input->to(*state_->options.param_dtype);
    }
    tensors.push_back(*input);
  }
  const std::vector<at::Tensor> aliases = state_->module->forward().pre_forward(unit, tensors);
  for (size_t i = 0; i < inputs.size(); ++i) {
    *inputs[i] = aliases[i];
  }
}

void ShardedCore::after_forward(int64_t unit, const std::vector<at::Tensor>& outputs) {
  state_->module->forward().post_forward(unit, outputs);
}

void ShardedCore::set_synchronize(bool synchronize) { state_->module->backward().set_synchronize(synchronize); }

// --- access between steps ---

void ShardedCore::unshard_all(bool writable) { state_->module->unshard_all(writable); }
void ShardedCore::reshard_all() { state_->module->reshard_all(); }

StateDict ShardedCore::full_state_dict(std::optional<c10::ScalarType> dtype) {
  at::NoGradGuard no_grad;
  const auto copy = [&](const at::Tensor& value) {
    const bool is_cast = dtype.has_value() && value.is_floating_point();
    return value.to(at::TensorOptions().device(at::kCPU).dtype(is_cast ? *dtype : value.scalar_type()),
                    /*non_blocking=*/false, /*copy=*/true);
  };
  const auto root = state_->live_root("full_state_dict");
  state_->module->settle_writes("full_state_dict");
  std::map<std::string, at::Tensor> values;
  for (size_t index = 0; index < state_->module->units().flats().size(); ++index) {
    const at::Tensor whole = state_->module->masters().gather(static_cast<int64_t>(index));
    if (rank() != 0) {
      continue;
    }
    for (const ParameterSlot& slot : state_->module->units().flats()[index]->slots()) {
      const at::Tensor value = copy(whole.narrow(0, slot.offset, slot.numel).view(slot.parameter().sizes()));
      for (const std::string& name : slot.names) {
        values[name] = value;
      }
    }
  }
  StateDict result;
  if (rank() != 0) {
    return result;
  }
  for (const auto& parameter : root->named_parameters()) {
    result.insert(parameter.key(), values.at(parameter.key()));
  }
  for (const auto& buffer : root->named_buffers()) {
    result.insert(buffer.key(), copy(buffer.value()));
  }
  return result;
}

void ShardedCore::load_full_state_dict(const StateDict& state) {
  at::NoGradGuard no_grad;
  const auto root = state_->live_root("load_full_state_dict");
  auto entries = root->named_parameters();
  entries.update(root->named_buffers());
  for (const auto& entry : entries) {
    const at::Tensor* value = state.find(entry.key());
    TORCH_CHECK_VALUE(value != nullptr, state_->context("load_full_state_dict"), "'", entry.key(), "' is missing.");
    TORCH_CHECK_VALUE(value->sizes() == entry.value().sizes(), state_->context("load_full_state_dict"), "'",
                      entry.key(), "' has shape ", value->sizes(), ", expected ", entry.value().sizes(), ".");
  }
  for (const auto& value : state) {
    TORCH_CHECK_VALUE(entries.contains(value.key()), state_->context("load_full_state_dict"), "'", value.key(),
                      "' is unexpected: the module has no such parameter or buffer.");
  }
  state_->module->begin_step();
  for (size_t index = 0; index < state_->module->units().flats().size(); ++index) {
    const auto& slots = state_->module->units().flats()[index]->slots();
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      state_->module->masters().load(static_cast<int64_t>(index), static_cast<int64_t>(slot),
                                     state[slots[slot].names.front()]);
    }
  }
  const bool is_same = state_->module->end_load();
  TORCH_CHECK(is_same, state_->context("load_full_state_dict"), kReplicasDiffer);
  for (auto& buffer : root->named_buffers()) {
    buffer.value().copy_(state[buffer.key()]);
  }
}

// --- step ---

double ShardedCore::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  return state_->module->gradients().clip_norm(max_norm, norm_type, error_if_nonfinite);
}

void ShardedCore::zero_gradients() { state_->module->gradients().zero(); }

const std::vector<ShardedCore::UpdateRange>& ShardedCore::update_ranges() const { return state_->ranges; }

void ShardedCore::begin_step() {
  ShardedModule& module = *state_->module;
  std::vector<at::Tensor> gradients;  // per flat
  for (size_t index = 0; index < module.units().flats().size(); ++index) {
    gradients.push_back(module.units().flats()[index]->is_trainable()
                            ? module.gradients().of(static_cast<int64_t>(index))
                            : at::Tensor());
  }
  module.begin_step();
  for (size_t i = 0; i < state_->ranges.size(); ++i) {
    const State::Place& place = state_->places[i];
    const at::Tensor& values = state_->ranges[i].values;
    if (values.defined() && gradients[place.flat].defined() && module.gradients().has(place.flat, place.slot)) {
      values.mutable_grad() = gradients[place.flat].narrow(0, place.start, values.numel());
    }
  }
}

void ShardedCore::end_step() {
  at::NoGradGuard no_grad;
  for (const UpdateRange& range : state_->ranges) {
    if (range.values.defined()) {
      range.values.mutable_grad().reset();
    }
  }
  for (const auto& flat : state_->module->units().flats()) {
    if (flat->is_trainable() && flat->parameter_out.defined()) {
      flat->parameter_out.copy_(flat->master.values);
    }
  }
  state_->module->end_step();
}

// --- facts ---

int64_t ShardedCore::rank() const { return state_->module->communicator().rank(); }
int64_t ShardedCore::world_size() const { return state_->module->communicator().world_size(); }
std::string ShardedCore::fetch_name() const { return state_->module->whole_units().fetch().name(); }

}  // namespace zeropg

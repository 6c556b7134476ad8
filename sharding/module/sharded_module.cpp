#include "sharding/module/sharded_module.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "sharding/parameters/master.h"

namespace zeropg {

ShardedModule::ShardedModule(RankGroups groups, RankGroups reduction_groups, const ShardingOptions& options)
    : communicator_(std::move(groups)),
      reductions_(std::move(reduction_groups), communicator_.log()),
      options_(options) {}

std::shared_ptr<ShardedModule> ShardedModule::create(const ModelSource& source, RankGroups groups,
                                                     RankGroups reduction_groups, const ShardingOptions& options) {
  const int rank = groups.shards->getRank();
  const int size = groups.shards->getSize();
  const RankGroups::Group& reductions = reduction_groups.shards;
  TORCH_CHECK_VALUE(reductions->getRank() == rank && reductions->getSize() == size, "[zeropg rank ",
                    groups.everybody->getRank(), "/", groups.everybody->getSize(), "] fully_shard: this rank is rank ",
                    rank, " of ", size, " in its group, and rank ", reductions->getRank(), " of ",
                    reductions->getSize(),
                    " in the reduction group; expected a group of the same ranks in the same order, since each rank "
                    "keeps the slices of its number. Make it with the ranks of the first group, in their order.");
  auto module =
      std::shared_ptr<ShardedModule>(new ShardedModule(std::move(groups), std::move(reduction_groups), options));
  module->build(source);
  module->backward_->install(std::shared_ptr<Backward>(module, module->backward_.get()));
  return module;
}

void ShardedModule::build(const ModelSource& source) {
  at::NoGradGuard no_grad;
  // The units and their masters, with rank 0's values.
  units_ = std::make_unique<Units>(communicator_, options_, source);
  masters_ = std::make_unique<Masters>(communicator_, options_, *units_);
  masters_->reserve();
  units_->adopt(source, [this] { return answer_to_write(); });
  // What becomes of gradients.
  using DuringBackward = GradientReducer::DuringBackward;
  const bool have_own_group = reductions_.groups().shards != communicator_.groups().shards;
  const DuringBackward during_backward = !units_->fetch().is_collective() ? DuringBackward::kSendAndWait
                                         : have_own_group                 ? DuringBackward::kSend
                                                                          : DuringBackward::kCollect;
  reducer_ = std::make_unique<GradientReducer>(reductions_, options_, units_->backward_order(), during_backward);
  state_offload_ = std::make_unique<StateOffload>(communicator_, *units_, *reducer_);
  backward_ = std::make_unique<Backward>(communicator_, options_, *units_, *masters_, *reducer_, *state_offload_);
  gradients_ = std::make_unique<GradientAccess>(communicator_, *units_, *backward_, *reducer_);
}

// --- forward ---

std::vector<at::Tensor> ShardedModule::pre_forward(int64_t index, const std::vector<at::Tensor>& inputs,
                                                   bool has_other_inputs) {
  Unit& unit = (*units_)[index];
  state_offload_->check(StateOffload::kParameters, "forward");
  backward_->recover();
  if (unit.is_root) {
    backward_->notice_unfrozen();
    if (!backward_->is_running()) {
      units_->end_pass();
    }
  }
  units_->unshard(unit);
  if (has_overlapped_) {  // its weights may be shared with units, whose forward may be called alone
    units_->unshard(units_->all().back());
  }
  // A forward inside a backward (activation checkpointing) is none of its own.
  forward_depth_ = unit.is_root ? 1 : forward_depth_ + 1;
  if (forward_depth_ == 1 && !backward_->is_running()) {
    units_->ledger().begin_forward();
    may_have_backward_ = at::GradMode::is_enabled();
  }
  units_->begin_forward(unit);
  unit.forwards += backward_->is_running() ? 0 : 1;
  unit.forward_began = communicator_.log()->now();
  unit.has_hooked_inputs = false;
  unit.has_other_inputs = has_other_inputs;
  std::vector<at::Tensor> aliases = inputs;
  if (!options_.stage.shards_parameters || !at::GradMode::is_enabled()) {
    return aliases;
  }
  // The gradients of its inputs are the last that need its parameters.
  for (at::Tensor& input : aliases) {
    if (input.requires_grad() && input.layout() != at::kStrided) {
      unit.has_other_inputs = true;
    } else if (input.requires_grad()) {
      input = input.view_as(input);
      unit.has_hooked_inputs = true;
      input.register_hook([weak = weak_from_this(), index](const at::Tensor& gradient) {
        if (const auto self = weak.lock()) {
          self->backward_->inputs_done((*self->units_)[index]);
        }
        return gradient;
      });
    }
  }
  return aliases;
}

void ShardedModule::post_forward(int64_t index, const std::vector<at::Tensor>& outputs) {
  Unit& unit = (*units_)[index];
  forward_depth_ = std::max<int64_t>(forward_depth_ - 1, 0);
  units_->end_forward(unit);
  communicator_.log()->add(EventLog::Kind::kForward, unit.name, std::exchange(unit.forward_began, 0));
  communicator_.log()->sample([&] { return memory_report(); });
  bool needs_backward = false;
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && at::GradMode::is_enabled()) {
      needs_backward = true;
      if (unit.is_root || options_.stage.shards_parameters || communicator_.log()->is_on()) {
        output.register_hook([weak = weak_from_this(), index, waits = unit.has_hooked_inputs,
                              stays = unit.has_other_inputs](const at::Tensor& gradient) {
          if (const auto self = weak.lock()) {
            self->backward_->begin_unit((*self->units_)[index], waits, stays);
          }
          return gradient;
        });
      } else if (has_overlapped_) {  // a backward of a part of the model may read weights before it has any gradient
        output.register_hook([weak = weak_from_this()](const at::Tensor& gradient) {
          if (const auto self = weak.lock()) {
            self->units_->join();
          }
          return gradient;
        });
      }
    }
  }
  // The root's backward follows its forward at once; inside a backward (activation checkpointing) the unit is about to
  // be used.
  const bool keep = needs_backward && (unit.is_root || !options_.reshard_after_forward);
  if (keep || backward_->is_running() || units_->keeps_whole()) {
    return;
  }
  if (may_have_backward_ && !unit.is_root) {  // also under a checkpoint, whose forward has no graph
    units_->reshard_or_keep(unit);
  } else {
    units_->reshard(unit);
  }
}

void ShardedModule::abandon_forward(int64_t index) {
  forward_depth_ = std::max<int64_t>(forward_depth_ - 1, 0);
  units_->end_forward((*units_)[index]);
  if (!backward_->is_running() && !units_->keeps_whole()) {
    units_->reshard((*units_)[index]);
  }
}

void ShardedModule::set_averages_gradients(bool averages) {
  TORCH_CHECK_VALUE(averages || !options_.stage.shards_gradients, communicator_.context("set_averages_gradients"),
                    "stage ", options_.stage.number,
                    " keeps slices of averages; expected stage 0 or 1 for unaveraged gradients");
  reducer_->set_averages(averages);
}

// --- access between steps ---

WriteLedger::Answer ShardedModule::answer_to_write() const {
  using Answer = WriteLedger::Answer;
  if (!options_.stage.shards_parameters || units_->is_full_for_writing()) {
    return Answer::kInPlace;
  }
  const bool only_reads = units_->full_depth() > 0 && forward_depth_ == 0 && !backward_->is_running();
  // Raw pointers are mostly read (numpy(), torch.save); what is written through them is settled like the rest.
  return only_reads && is_asked_by_kernel() ? Answer::kRefused : Answer::kInCopy;
}

void ShardedModule::settle_writes(const char* operation) {
  state_offload_->check(StateOffload::kParameters | StateOffload::kMasters, operation);
  units_->join();
  if (!units_->is_full_for_reading()) {
    backward_->check_outside(operation);
    backward_->recover();
    masters_->settle(operation);
  }
}

at::Tensor ShardedModule::read_only_shard(const at::Tensor& shard, const std::string& message) {
  state_offload_->check(StateOffload::kMasters | StateOffload::kParameters, "local_shards");
  return make_read_only(shard, message, [weak = weak_from_this()](WatchedStorage& storage) {
    if (const auto self = weak.lock()) {
      self->units_->ledger().note_pointer_to_shards(storage);
    }
  });
}

void ShardedModule::unshard_all(bool writable) {
  state_offload_->check(StateOffload::kParameters | (writable ? StateOffload::kMasters : 0u), "full_parameters");
  TORCH_CHECK(!units_->is_full_for_reading() || !writable, communicator_.context("full_parameters"),
              "writable=True inside a full_parameters that is not; make the outer one writable.");
  if (units_->full_depth() == 0) {
    if (options_.stage.shards_parameters) {
      backward_->check_outside("full_parameters");
    }
    forward_depth_ = 0;
    if (units_->ledger().may_differ(options_.stage.shards_parameters)) {
      settle_writes("full_parameters");
    }
    backward_->recover();
  }
  units_->begin_full(writable);
}

void ShardedModule::reshard_all() {
  const std::exception_ptr failure = failure_of([&] {
    if (units_->full_depth() == 1 && units_->is_full_for_writing()) {
      settle_writes("full_parameters");
    }
  });
  units_->end_full();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void ShardedModule::dissolve() {
  at::NoGradGuard no_grad;
  settle_writes("fully_shard");
  for (size_t i = 0; i < flats().size(); ++i) {
    const at::Tensor values = masters_->gather(static_cast<int64_t>(i));
    for (ParameterSlot& slot : flats()[i]->slots()) {
      const at::Tensor value = values.narrow(0, slot.offset, slot.numel).view(slot.parameter.sizes());
      slot.parameter.mutable_grad().reset();
      slot.parameter.set_data(value.to(flats()[i]->original_dtype(), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

// --- step ---

void ShardedModule::begin_step() {
  state_offload_->check(StateOffload::kParameters | StateOffload::kMasters, "step");
  communicator_.log()->begin_step();
  backward_->check_outside("step");
  TORCH_CHECK(units_->full_depth() == 0, communicator_.context("step"),
              "called inside full_parameters; call it after.");
  TORCH_CHECK(!units_->is_updating(), communicator_.context("step"),
              "called while masters are written; call it after.");
  backward_->recover();
  forward_depth_ = 0;
  units_->join();
  units_->reshard_all();  // a forward without backward leaves units whole, with the values of before the step
  masters_->begin_update("step");
  units_->set_updating(true);
}

GradientAccess& ShardedModule::gradients() {
  state_offload_->check(StateOffload::kGradients, "gradients");
  return *gradients_;
}

void ShardedModule::end_step(bool overlaps) {
  has_overlapped_ |= overlaps && !options_.stage.shards_parameters;
  end_update(overlaps ? Fetch::Change::kOverlappedStep : Fetch::Change::kStep);
}

bool ShardedModule::end_load() {
  bool is_same = true;
  const std::exception_ptr failure = failure_of([&] { is_same = masters_->unite_replicas("load"); });
  end_update(Fetch::Change::kLoad);
  if (failure != nullptr) std::rethrow_exception(failure);
  return is_same;
}

void ShardedModule::end_update(Fetch::Change change) {
  for (const auto& flat : flats()) {
    for (const ParameterSlot& slot : flat->slots()) {
      if (slot.parameter.grad().defined()) {
        slot.parameter.unsafeGetTensorImpl()->bump_version();  // autograd refuses graphs of before the step
      }
    }
  }
  at::NoGradGuard no_grad;
  units_->set_updating(false);
  masters_->end_update(change);
  if (change != Fetch::Change::kLoad) {
    communicator_.log()->end_step();
    communicator_.log()->sample([&] { return memory_report(); });
  }
}

// --- facts ---

std::vector<std::string> ShardedModule::changed_parameters() {
  const std::vector<std::string> changed = units_->ledger().take_over_replaced();
  if (changed.empty() || options_.stage.shards_parameters) {
    return changed;
  }
  units_->join();  // what is on its way cannot be taken over
  return units_->ledger().take_over_replaced();
}

std::map<std::string, int64_t> ShardedModule::memory_report() const {
  const Fetch::Memory memory = units_->fetch().memory();
  int64_t masters = 0;
  for (const auto& flat : flats()) {
    masters += resident_master_bytes(*flat);
  }
  std::map<std::string, int64_t> report = {
      {"parameters", memory.parameters},     {"masters", masters},
      {"gathered", memory.gathered},         {"gradients", reducer_->gradient_bytes()},
      {"buckets", reducer_->bucket_bytes()}, {"residuals", reducer_->residual_bytes()}};
  if (options_.optimizer_offload != nullptr) {
    report["offloaded"] = static_cast<int64_t>(options_.optimizer_offload->tier().reserved_bytes());
    report["staging"] = options_.optimizer_offload->staging_bytes();
  }
  return report;
}

}  // namespace zeropg

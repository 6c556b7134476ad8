#include "sharding/module/sharded_module.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <functional>
#include <utility>

#include "sharding/module/memory_report.h"
#include "sharding/units/adopt.h"

namespace zeropg {

namespace {

// Autograd refuses graphs of before: it takes the parameters for changed in place. Those that were made in inference
// mode have no version, and no graph.
void refuse_graphs(const Units& units, const std::function<bool(const ParameterSlot&)>& is_changed) {
  for (const auto& flat : units.flats()) {
    for (const ParameterSlot& slot : flat->slots()) {
      c10::TensorImpl* const parameter = slot.parameter().unsafeGetTensorImpl();
      if (is_changed(slot) && parameter->version_counter().enabled()) parameter->bump_version();
    }
  }
}

}  // namespace

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
  module->forward_->install(std::shared_ptr<Forward>(module, module->forward_.get()));
  return module;
}

void ShardedModule::build(const ModelSource& source) {
  at::NoGradGuard no_grad;
  // The units and their masters, with rank 0's values.
  units_ = std::make_unique<Units>(communicator_, options_, source);
  reserve_masters(communicator_, options_, *units_);
  whole_units_ = std::make_unique<WholeUnits>(communicator_, options_, *units_, [this] { return answer_to_write(); });
  masters_ = std::make_unique<Masters>(communicator_, options_, *units_, *whole_units_);
  adopt(source, communicator_, *units_, whole_units_->fetch(), whole_units_->ledger());
  // What becomes of gradients.
  using DuringBackward = GradientReducer::DuringBackward;
  const bool have_own_group = reductions_.groups().shards != communicator_.groups().shards;
  const DuringBackward during_backward = !whole_units_->fetch().is_collective() ? DuringBackward::kSendAndWait
                                         : have_own_group                       ? DuringBackward::kSend
                                                                                : DuringBackward::kCollect;
  if (during_backward == DuringBackward::kSend) watch_paths(communicator_, reductions_, options_.store);
  reducer_ = std::make_unique<GradientReducer>(reductions_, options_, units_->backward_order(), during_backward);
  state_offload_ = std::make_unique<StateOffload>(communicator_, *units_, *whole_units_, *reducer_);
  // What runs.
  backward_ = std::make_unique<Backward>(communicator_, options_, *units_, *whole_units_, *masters_, *reducer_,
                                         *state_offload_);
  forward_ = std::make_unique<Forward>(communicator_, options_, *units_, *whole_units_, *reducer_, *state_offload_,
                                       *backward_);
  gradients_ = std::make_unique<GradientAccess>(communicator_, *units_, *backward_, *reducer_);
}

void ShardedModule::set_averages_gradients(bool averages) {
  TORCH_CHECK_VALUE(averages || !options_.stage.shards_gradients, communicator_.context("set_averages_gradients"),
                    "stage ", options_.stage.number,
                    " keeps slices of averages; expected stage 0 or 1 for unaveraged gradients");
  reducer_->context().averages = averages;
}

// --- access between steps ---

WriteLedger::Answer ShardedModule::answer_to_write() const {
  using Answer = WriteLedger::Answer;
  if (!options_.stage.shards_parameters || whole_units_->is_full_for_writing()) {
    return Answer::kInPlace;
  }
  const bool only_reads = whole_units_->full_depth() > 0 && !forward_->is_running() && !backward_->is_running();
  // Raw pointers are mostly read (numpy(), torch.save); what is written through them is settled like the rest.
  return only_reads && is_asked_by_kernel() ? Answer::kRefused : Answer::kInCopy;
}

void ShardedModule::settle_writes(const char* operation) {
  state_offload_->check(StateOffload::kParameters | StateOffload::kMasters, operation);
  whole_units_->join();
  if (!whole_units_->is_full_for_reading()) {
    backward_->check_outside(operation);
    backward_->recover();
    masters_->settle(operation);
  }
}

at::Tensor ShardedModule::read_only_shard(const at::Tensor& shard, const std::string& message) {
  state_offload_->check(StateOffload::kMasters | StateOffload::kParameters, "local_shards");
  return make_read_only(shard, message, [weak = weak_from_this()](WatchedStorage& storage) {
    if (const auto self = weak.lock()) {
      self->whole_units_->ledger().note_pointer_to_shards(storage);
    }
  });
}

void ShardedModule::unshard_all(bool writable) {
  state_offload_->check(StateOffload::kParameters | (writable ? StateOffload::kMasters : 0u), "full_parameters");
  TORCH_CHECK(!whole_units_->is_full_for_reading() || !writable, communicator_.context("full_parameters"),
              "writable=True inside a full_parameters that is not; make the outer one writable.");
  if (whole_units_->full_depth() == 0) {
    if (options_.stage.shards_parameters) {
      backward_->check_outside("full_parameters");
    }
    forward_->forget();
    if (whole_units_->ledger().may_differ(options_.stage.shards_parameters)) {
      settle_writes("full_parameters");
    }
    backward_->recover();
  }
  whole_units_->begin_full(writable);
}

void ShardedModule::reshard_all() {
  const std::exception_ptr failure = failure_of([&] {
    if (whole_units_->full_depth() == 1 && whole_units_->is_full_for_writing()) {
      settle_writes("full_parameters");
    }
  });
  whole_units_->end_full();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void ShardedModule::dissolve() {
  at::NoGradGuard no_grad;
  settle_writes("fully_shard");
  for (size_t i = 0; i < units_->flats().size(); ++i) {
    const at::Tensor values = masters_->gather(static_cast<int64_t>(i));
    for (ParameterSlot& slot : units_->flats()[i]->slots()) {
      const at::Tensor value = values.narrow(0, slot.offset, slot.numel).view(slot.sizes);
      slot.parameter().mutable_grad().reset();
      slot.tensors.local.set_data(
          value.to(units_->flats()[i]->original_dtype(), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

// --- step ---

void ShardedModule::begin_step(const OptionDigests& options) {
  const bool is_step = options.first != 0;
  const char* const operation = is_step ? "step" : "load";
  state_offload_->check(StateOffload::kParameters | StateOffload::kMasters, operation);
  communicator_.log()->begin_step();
  backward_->check_outside(operation);
  TORCH_CHECK(whole_units_->full_depth() == 0, communicator_.context(operation),
              "called inside full_parameters; call it after.");
  TORCH_CHECK(!whole_units_->is_updating(), communicator_.context(operation),
              "called while masters are written; call it after.");
  backward_->recover();
  forward_->forget();
  whole_units_->join();
  whole_units_->reshard_all();  // a forward without backward leaves units whole, with the values of before the step
  masters_->begin_update(operation, is_step ? StepPlan{options, gradients_->digest()} : StepPlan{.is_load = true});
  whole_units_->set_updating(true);
}

GradientAccess& ShardedModule::gradients() {
  state_offload_->check(StateOffload::kGradients, "gradients");
  return *gradients_;
}

void ShardedModule::end_step(bool overlaps) {
  refuse_graphs(*units_, &ParameterSlot::has_gradient);
  end_update(overlaps ? Fetch::Change::kOverlappedStep : Fetch::Change::kStep);
}

bool ShardedModule::end_load(bool replaces_all) {
  refuse_graphs(*units_, [&](const ParameterSlot& slot) { return replaces_all || slot.has_gradient(); });
  bool is_same = true;
  const std::exception_ptr failure = failure_of([&] { is_same = masters_->unite_replicas("load"); });
  end_update(Fetch::Change::kLoad);
  if (failure != nullptr) std::rethrow_exception(failure);
  return is_same;
}

void ShardedModule::end_update(Fetch::Change change) {
  at::NoGradGuard no_grad;
  whole_units_->set_updating(false);
  masters_->end_update(change);
  if (change != Fetch::Change::kLoad) {
    communicator_.log()->end_step();
    communicator_.log()->sample([&] { return memory_report(); });
  }
}

// --- facts ---

std::vector<std::string> ShardedModule::changed_parameters() {
  const std::vector<std::string> changed = whole_units_->ledger().take_over_replaced();
  if (changed.empty() || options_.stage.shards_parameters) {
    return changed;
  }
  whole_units_->join();  // what is on its way cannot be taken over
  return whole_units_->ledger().take_over_replaced();
}

std::map<std::string, int64_t> ShardedModule::memory_report() const {
  return zeropg::memory_report(options_, *units_, whole_units_->fetch(), *reducer_);
}

}  // namespace zeropg

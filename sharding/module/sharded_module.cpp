#include "sharding/module/sharded_module.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <exception>
#include <functional>
#include <iterator>
#include <tuple>
#include <utility>

#include "sharding/fetch/registry.h"
#include "sharding/module/clip.h"

namespace zeropg {
namespace {

bool is_autograd_running() { return torch::autograd::get_current_graph_task_id() != -1; }

// The parameters of a unit by (dtype, trainable or frozen), each group in the given order.
std::vector<std::vector<FlatParameter::Source>> group_sources(const std::vector<FlatParameter::Source>& sources) {
  std::vector<std::vector<FlatParameter::Source>> groups;
  std::map<std::tuple<c10::ScalarType, bool, std::string>, size_t> index;
  for (const auto& source : sources) {
    const auto key = std::make_tuple(source.parameter.scalar_type(), source.parameter.requires_grad(),
                                     source.parameter.device().str());
    const auto [entry, is_new] = index.try_emplace(key, groups.size());
    if (is_new) {
      groups.emplace_back();
    }
    groups[entry->second].push_back(source);
  }
  return groups;
}

std::exception_ptr failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

ShardedModule::ShardedModule(c10::intrusive_ptr<c10d::ProcessGroup> group,
                             c10::intrusive_ptr<c10d::ProcessGroup> reduction_group, const ShardingOptions& options)
    : communicator_(std::move(group)), reductions_(std::move(reduction_group)), options_(options) {}

std::shared_ptr<ShardedModule> ShardedModule::create(const std::vector<UnitSource>& units,
                                                     c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                     c10::intrusive_ptr<c10d::ProcessGroup> reduction_group,
                                                     const ShardingOptions& options) {
  const int rank = group->getRank();
  const int world_size = group->getSize();
  TORCH_CHECK_VALUE(reduction_group->getRank() == rank && reduction_group->getSize() == world_size, "[zeropg rank ",
                    rank, "/", world_size, "] fully_shard: this rank is rank ", reduction_group->getRank(), " of ",
                    reduction_group->getSize(),
                    " in the reduction group; expected a group of the same ranks in the same order, since each rank "
                    "keeps the slices of its number. Make it with the ranks of the first group, in their order.");
  auto module =
      std::shared_ptr<ShardedModule>(new ShardedModule(std::move(group), std::move(reduction_group), options));
  module->build(units);
  module->install_hooks();
  return module;
}

std::string ShardedModule::context(const char* operation) const {
  return c10::str("[zeropg rank ", rank(), "/", world_size(), "] ", operation, ": ");
}

void ShardedModule::build(const std::vector<UnitSource>& sources) {
  at::NoGradGuard no_grad;
  std::vector<FlatParameter*> all;
  for (const UnitSource& source : sources) {
    Unit unit;
    unit.name = source.name;
    unit.is_root = &source == &sources.back();
    for (const auto& group : group_sources(source.parameters)) {
      flats_.push_back(std::make_unique<FlatParameter>(source.name, group, options_, rank(), world_size()));
      FlatParameter* flat = flats_.back().get();
      unit.flats.push_back(flat);
      unit_of_[flat] = static_cast<int64_t>(units_.size());
      all.push_back(flat);
    }
    units_.push_back(std::move(unit));
  }
  reserve_masters();
  if (world_size() > 1) {
    for (FlatParameter* flat : all) {
      communicator_.wait(communicator_.broadcast(flat->initial_values(), /*root=*/0));
    }
  }
  fetch_ = make_fetch(communicator_, options_, all);
  ledger_ = std::make_unique<WriteLedger>(communicator_, all, [this] { return answer_to_write(); });
  fetch_->adopt(all);
  using DuringBackward = GradientReducer::DuringBackward;
  const DuringBackward during_backward = !fetch_->is_collective()                       ? DuringBackward::kSendAndWait
                                         : reductions_.group() != communicator_.group() ? DuringBackward::kSend
                                                                                        : DuringBackward::kCollect;
  reducer_ = std::make_unique<GradientReducer>(reductions_, options_, backward_order(), during_backward);
}

void ShardedModule::reserve_masters() {
  const std::exception_ptr failure = failure_of([&] {
    for (const auto& flat : flats_) {
      flat->reserve_master(options_);
    }
  });
  fail_together(failure, "fully_shard", "reserve room for", ENOSPC);
}

void ShardedModule::fail_together(const std::exception_ptr& failure, const char* operation, const char* could_not,
                                  int code) {
  if (options_.optimizer_offload != nullptr && world_size() > 1 && !flats_.empty()) {
    const at::Tensor mine = at::zeros({1}, at::kDouble).fill_(failure == nullptr ? 0.0 : 1.0);
    const c10::Device device = flats_.front()->device();
    const at::Tensor all = at::empty({world_size()}, mine.options().device(device));
    communicator_.wait(communicator_.all_gather(all, mine.to(device)));
    if (failure == nullptr && all.max().item<double>() > 0) {
      throw TierError(c10::str(context(operation), "rank ", all.argmax().item<int64_t>(), " could not ", could_not,
                               " its masters; see its error."),
                      code);
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Backward runs the units from last to first; the root, which holds the embedding, is done at the very end.
std::vector<FlatParameter*> ShardedModule::backward_order() const {
  std::vector<FlatParameter*> order;
  const auto append = [&](const Unit& unit) {
    std::copy_if(unit.flats.begin(), unit.flats.end(), std::back_inserter(order),
                 [](const FlatParameter* flat) { return c10::isFloatingType(flat->dtype()); });
  };
  std::for_each(units_.rbegin() + 1, units_.rend(), append);
  append(units_.back());
  return order;
}

void ShardedModule::install_hooks() {
  reducer_->install(
      weak_from_this(), [this](FlatParameter& flat) { before_gradient(flat); },
      [this](FlatParameter& flat) { after_gradient(flat); });
}

// --- forward and backward ---

void ShardedModule::unshard(Unit& unit, bool writable) {
  if (unit.is_whole) {
    return;
  }
  TORCH_CHECK(!is_updating_, context("forward"),
              "called while masters are written (zeropg.writable_shards); call it after the `with`.");
  at::NoGradGuard no_grad;
  if (fetch_->is_collective() && full_depth_ == 0) {
    unshard_order_.add(&unit - units_.data());
  }
  try {
    for (FlatParameter* flat : unit.flats) {
      fetch_->unshard(*flat, writable);
      ledger_->show_own_writes(*flat);
    }
  } catch (...) {
    reshard(unit);
    throw;
  }
  unit.is_whole = true;
}

void ShardedModule::reshard(Unit& unit) {
  if (full_depth_ > 0 || !options_.stage.shards_parameters) {
    return;
  }
  at::NoGradGuard no_grad;
  for (FlatParameter* flat : unit.flats) {
    if (flat->is_attached()) {
      ledger_->keep_own_writes(*flat);
      fetch_->reshard(*flat);
    }
  }
  unit.is_whole = false;
}

void ShardedModule::reshard_units() {
  keeps_whole_ = false;
  for (Unit& unit : units_) {
    reshard(unit);
  }
}

// A backward that raised ran no callback at its end: autograd dropped it, and with it the token. Its gradients are
// incomplete and must not reach the next step.
void ShardedModule::recover_from_broken_backward() {
  const bool still_runs = is_autograd_running() && !backward_token_.expired();
  if (!is_in_backward_ || still_runs) {
    return;
  }
  if (accumulates_) {
    reducer_->abandon_backward();
  }
  accumulates_ = false;
  keeps_whole_ = false;
  is_in_backward_ = false;  // not before: where a signal handler ends the waiting, the next call does this again
  unshard_order_ = UnitOrder();
  for (Unit& unit : units_) {
    unit.is_in_backward = false;
    unit.waits_for_inputs = false;
    unit.stays_whole = false;
    unit.forwards = 0;
    reshard(unit);
  }
}

std::vector<at::Tensor> ShardedModule::pre_forward(int64_t index, const std::vector<at::Tensor>& inputs,
                                                   bool has_other_inputs) {
  Unit& unit = units_[index];
  recover_from_broken_backward();
  if (unit.is_root) {
    notice_unfrozen();
  }
  unshard(unit);
  forward_depth_ = unit.is_root ? 1 : forward_depth_ + 1;
  if (forward_depth_ == 1 && !is_in_backward_) {
    ledger_->begin_forward();
  }
  unit.forwards += is_in_backward_ ? 0 : 1;
  unit.has_hooked_inputs = false;
  unit.has_other_inputs = has_other_inputs;
  std::vector<at::Tensor> aliases = inputs;
  if (!options_.stage.shards_parameters || !at::GradMode::is_enabled()) {
    return aliases;
  }
  for (at::Tensor& input : aliases) {
    if (input.requires_grad() && input.layout() != at::kStrided) {
      unit.has_other_inputs = true;
    } else if (input.requires_grad()) {
      input = input.view_as(input);
      unit.has_hooked_inputs = true;
      input.register_hook([weak = weak_from_this(), index](const at::Tensor& gradient) {
        if (const auto self = weak.lock()) {
          Unit& finished = self->units_[index];
          finished.waits_for_inputs = false;
          self->maybe_reshard_in_backward(finished);
        }
        return gradient;
      });
    }
  }
  return aliases;
}

void ShardedModule::post_forward(int64_t index, const std::vector<at::Tensor>& outputs) {
  Unit& unit = units_[index];
  forward_depth_ = std::max<int64_t>(forward_depth_ - 1, 0);
  bool needs_backward = false;
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && at::GradMode::is_enabled()) {
      needs_backward = true;
      if (unit.is_root || options_.stage.shards_parameters) {
        output.register_hook([weak = weak_from_this(), index, waits = unit.has_hooked_inputs,
                              stays = unit.has_other_inputs](const at::Tensor& gradient) {
          if (const auto self = weak.lock()) {
            self->begin_backward();
            self->units_[index].waits_for_inputs = waits;
            self->units_[index].stays_whole |= stays;
            self->before_unit_backward(self->units_[index]);
          }
          return gradient;
        });
      }
    }
  }
  // The root's backward follows its forward at once; inside a backward (activation checkpointing) the unit is about to
  // be used.
  const bool keep = needs_backward && (unit.is_root || !options_.reshard_after_forward);
  if (!keep && !is_in_backward_ && !keeps_whole_) {
    reshard(unit);
  }
}

void ShardedModule::abandon_forward(int64_t index) {
  forward_depth_ = std::max<int64_t>(forward_depth_ - 1, 0);
  if (!is_in_backward_ && !keeps_whole_) {
    reshard(units_[index]);
  }
}

void ShardedModule::begin_backward() {
  recover_from_broken_backward();                         // no forward need lie between that one and this
  const bool creates_graph = at::GradMode::is_enabled();  // autograd sets it so in what it calls
  keeps_whole_ |= creates_graph;
  if (is_in_backward_ && (accumulates_ || !reducer_->will_accumulate())) {
    return;
  }
  notice_unfrozen();  // parameters may be used without a forward of the root
  TORCH_CHECK(!reducer_->would_add_to_shown(), context("backward"),
              "called inside full_gradients, where this rank's gradient would be added to the average that `.grad` "
              "shows; expected it before or after the `with`. Leave that first, and clone what is still needed of it.");
  if (reducer_->will_accumulate()) {
    reducer_->check_not_lost(context("backward"));
    reducer_->begin_backward(synchronize_);
    accumulates_ = true;
  }
  if (is_in_backward_) {
    return;  // a backward() inside a grad(), which ends both
  }
  is_in_backward_ = true;
  creates_graph_ = creates_graph;
  backward_task_ = torch::autograd::get_current_graph_task_id();
  const auto token = std::make_shared<int>();
  backward_token_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), token] {
    if (const auto self = weak.lock()) {
      self->finish_backward();
    }
  });
}

void ShardedModule::set_averages_gradients(bool averages) {
  TORCH_CHECK_VALUE(averages || !options_.stage.shards_gradients, context("set_averages_gradients"), "stage ",
                    options_.stage.number, " keeps slices of averages; expected stage 0 or 1 for unaveraged gradients");
  reducer_->set_averages(averages);
}

void ShardedModule::before_gradient(FlatParameter& flat) {
  begin_backward();
  // Where checkpoints run backwards inside this one, a parameter that was used twice gets a gradient from each.
  const Unit& unit = units_[unit_of_.at(&flat)];
  if (torch::autograd::get_current_graph_task_id() != backward_task_ && (unit.is_root || unit.forwards > 1)) {
    reducer_->hold_until_end(flat);
  }
}

void ShardedModule::before_unit_backward(Unit& unit) {
  unit.is_in_backward = true;
  unshard(unit);
}

void ShardedModule::after_gradient(FlatParameter& flat) { maybe_reshard_in_backward(units_[unit_of_.at(&flat)]); }

void ShardedModule::maybe_reshard_in_backward(Unit& unit) {
  if (unit.is_root || !unit.is_in_backward || unit.waits_for_inputs || unit.stays_whole || keeps_whole_ ||
      !accumulates_) {
    return;
  }
  for (const FlatParameter* flat : unit.flats) {
    if (flat->is_trainable() && !reducer_->is_complete(*flat)) {
      return;
    }
  }
  unit.is_in_backward = false;
  reshard(unit);
}

void ShardedModule::finish_backward() {
  keeps_whole_ = creates_graph_;
  for (Unit& unit : units_) {
    unit.is_in_backward = false;
    unit.waits_for_inputs = false;
    unit.stays_whole = false;
    unit.forwards = 0;
    if (!keeps_whole_) {
      reshard(unit);
    }
  }
  if (!accumulates_) {
    is_in_backward_ = false;
    return;  // no rank waits for this one
  }
  const bool is_compared = reducer_->synchronizes();
  const bool is_same_order = reducer_->finish_backward(unshard_order_.fingerprint());
  is_in_backward_ = false;
  accumulates_ = false;
  if (!is_compared) {
    return;  // inside no_sync: the order is kept until ranks next meet
  }
  const UnitOrder order = std::exchange(unshard_order_, UnitOrder());
  if (!is_same_order) {
    std::string names = order.is_cut() ? "..." : "";
    for (int64_t unit : order.last()) {
      names += (names.empty() ? "" : ", ") + (units_[unit].name.empty() ? std::string("(root)") : units_[unit].name);
    }
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(context("backward"),
                 "ranks made units whole in different orders, so they mixed their "
                 "parameters up; expected all ranks to take the same path through the model (only where they "
                 "share a node on zeropg may paths differ). This rank: ",
                 names));
  }
  if (ledger_->is_any_renormalized()) {  // before anything else is written to those parameters
    settle_writes("backward");
  }
  reducer_->run_hooks();
}

// --- access between steps ---

WriteLedger::Answer ShardedModule::answer_to_write() const {
  using Answer = WriteLedger::Answer;
  if (!options_.stage.shards_parameters || (full_depth_ > 0 && is_full_writable_)) {
    return Answer::kInPlace;
  }
  const bool only_reads = full_depth_ > 0 && forward_depth_ == 0 && !is_in_backward_;
  // Raw pointers are mostly read (numpy(), torch.save); what is written through them is settled like the rest.
  return only_reads && is_asked_by_kernel() ? Answer::kRefused : Answer::kInCopy;
}

void ShardedModule::settle_writes(const char* operation) {
  if (full_depth_ > 0 && !is_full_writable_) {
    return;  // nothing could be written, and what a forward inside wrote is settled after it
  }
  check_outside_backward(operation);
  recover_from_broken_backward();
  if (full_depth_ == 0) {
    reshard_units();
  }
  begin_update(operation);
  if (options_.stage.shards_parameters) {  // where they are replicated, all ranks have the new values by now
    fetch_->end_update(all_flats());
  }
}

// Begins a change of masters with what the program has written. Where it throws, the change has ended.
void ShardedModule::begin_update(const char* operation) {
  const bool is_same = fetch_->begin_update(ledger_->digest());
  const std::exception_ptr failure = failure_of([&] {
    const WriteLedger::Settlement settlement = ledger_->settle(is_same, operation);
    if (!settlement.changes.empty()) {
      fail_together(failure_of([&] { apply(settlement.changes); }), operation, "read and write", EIO);
    }
    if (settlement.may_have_written_shards) {
      publish_shards();
    }
    TORCH_CHECK(settlement.conflict.empty(), context(operation), settlement.conflict);
  });
  if (failure != nullptr) {
    if (options_.stage.shards_parameters) {
      fetch_->end_update(all_flats());  // the other ranks are waiting in theirs
    }
    std::rethrow_exception(failure);
  }
}

void ShardedModule::refresh_own_masters() {
  if (!options_.stage.shards_parameters) {  // where other ranks read what this one would write, ranks must meet first
    apply(ledger_->own_writes());
  }
}

at::Tensor ShardedModule::read_only_shard(const at::Tensor& shard, const std::string& message) {
  return make_read_only(shard, message, [weak = weak_from_this()](WatchedStorage& storage) {
    if (const auto self = weak.lock()) {
      self->ledger_->note_pointer_to_shards(storage);
    }
  });
}

void ShardedModule::publish_shards() {
  at::NoGradGuard no_grad;
  for (const auto& flat : flats_) {
    const at::Tensor own = flat->read_master(flat->shard_start() - flat->master_start,
                                             flat->shard_start() - flat->master_start + flat->layout().shard_numel);
    if (flat->parameter_out.defined()) {
      flat->parameter_out.narrow(0, flat->shard_start() - flat->master_start, own.numel()).copy_(own);
    }
    if (options_.stage.shards_parameters || world_size() == 1) {
      continue;
    }
    const at::Tensor part = flat->whole().narrow(0, flat->shard_start(), flat->layout().shard_numel);
    communicator_.wait(communicator_.all_gather(flat->whole(), part));
    if (!flat->is_own_master() && flat->master_numel == flat->layout().total_numel) {
      const at::Tensor whole = gather_slices(own.to(flat->device()));
      flat->write_master(0, whole);
    }
  }
}

// Between begin_update and end_update.
void ShardedModule::apply(const std::vector<WriteLedger::Change>& changes) {
  at::NoGradGuard no_grad;
  for (const WriteLedger::Change& change : changes) {
    FlatParameter& flat = *change.flat;
    const ParameterSlot& slot = flat.slots()[change.slot];
    // This rank's part of the parameter: elements [start, stop) of the masters.
    const int64_t start = std::clamp<int64_t>(slot.offset - flat.master_start, 0, flat.master_numel);
    const int64_t stop = std::clamp<int64_t>(slot.offset + slot.numel - flat.master_start, 0, flat.master_numel);
    if (start == stop) {
      continue;
    }
    if (flat.is_attached()) {
      write_back(flat, start, flat.whole().narrow(0, flat.master_start + start, stop - start));
      continue;
    }
    const at::Tensor places = change.positions + (slot.offset - flat.master_start);
    const at::Tensor is_mine = places.ge(start).logical_and(places.lt(stop));
    const at::Tensor& home = flat.is_own_master() ? flat.master : flat.parameter_out;
    const at::Tensor written = home.narrow(0, start, stop - start).clone();
    written.index_copy_(0, places.masked_select(is_mine) - start, change.values.masked_select(is_mine));
    write_back(flat, start, written);
  }
}

void ShardedModule::unshard_all(bool writable) {
  TORCH_CHECK(full_depth_ == 0 || is_full_writable_ || !writable, context("full_parameters"),
              "writable=True inside a full_parameters that is not; make the outer one writable.");
  if (full_depth_ == 0) {
    if (options_.stage.shards_parameters) {
      check_outside_backward("full_parameters");
    }
    forward_depth_ = 0;
    if (ledger_->may_differ(options_.stage.shards_parameters)) {
      settle_writes("full_parameters");
    }
    recover_from_broken_backward();
    reshard_units();
    try {
      for (Unit& unit : units_) {
        unshard(unit, writable);
      }
    } catch (...) {
      reshard_units();
      throw;
    }
    is_full_writable_ = writable;
  }
  ++full_depth_;
}

void ShardedModule::reshard_all() {
  const bool is_last = full_depth_ == 1;
  const std::exception_ptr failure = failure_of([&] {
    if (is_last && is_full_writable_) {
      settle_writes("full_parameters");
    }
  });
  --full_depth_;
  if (is_last) {
    reshard_units();
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Sets this rank's masters from element `start` on to what the parameter has there.
void ShardedModule::write_back(FlatParameter& flat, int64_t start, const at::Tensor& written) {
  if (flat.is_own_master()) {
    if (!written.is_alias_of(flat.master)) {
      flat.master.narrow(0, start, written.numel()).copy_(written);
    }
    return;
  }
  // A master is more precise than what the user saw, so it changes only where the user changed something.
  flat.read_master(start, start + written.numel(), [&](int64_t first, const at::Tensor& piece) {
    const at::Tensor after = written.narrow(0, first - start, piece.numel()).to(piece.device());
    const at::Tensor before = piece.to(flat.dtype());
    const at::Tensor is_changed = before.ne(after).logical_and(before.eq(before).logical_or(after.eq(after)));
    flat.write_master(first, at::where(is_changed, after.to(flat.master_dtype()), piece));
  });
  if (!written.is_alias_of(flat.parameter_out)) {
    flat.parameter_out.narrow(0, start, written.numel()).copy_(written);
  }
}

at::Tensor ShardedModule::gather_master(int64_t index) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *flats_[index];
  at::Tensor mine;
  const std::exception_ptr failure = failure_of([&] { mine = flat.read_master(0, flat.master_numel); });
  fail_together(failure, "full_state_dict", "read", EIO);
  return flat.master_numel == flat.layout().total_numel ? mine : gather_slices(mine.to(flat.device()));
}

// [world_size * n] of everybody's [n].
at::Tensor ShardedModule::gather_slices(const at::Tensor& mine) {
  at::Tensor whole = at::empty({world_size() * mine.numel()}, mine.options());
  communicator_.wait(communicator_.all_gather(whole, mine));
  return whole;
}

void ShardedModule::load_parameter(int64_t index, int64_t slot_index, const at::Tensor& value, int64_t first) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *flats_[index];
  const at::Tensor values = value.detach().reshape({-1});
  const ParameterSlot& slot = flat.slots().at(slot_index);
  TORCH_CHECK_VALUE(first >= 0 && values.numel() <= slot.numel - first, context("load"), "elements [", first, ", ",
                    first + values.numel(), ") of '", slot.names.front(), "', which has ", slot.numel);
  for (const SlotRange& range : flat.slots_in(flat.master_start, flat.master_start + flat.master_numel)) {
    const int64_t from = std::max(range.start, first);
    const int64_t to = std::min(range.stop, first + values.numel());
    if (range.slot == slot_index && from < to) {
      const int64_t start = range.flat_start + (from - range.start) - flat.master_start;
      const at::Tensor part = values.narrow(0, from - first, to - from).to(flat.master_dtype());
      flat.write_master(start, part);
      if (flat.parameter_out.defined()) {
        flat.parameter_out.narrow(0, start, part.numel()).copy_(part);
      }
    }
  }
}

void ShardedModule::dissolve() {
  at::NoGradGuard no_grad;
  settle_writes("fully_shard");
  for (size_t i = 0; i < flats_.size(); ++i) {
    const at::Tensor values = gather_master(static_cast<int64_t>(i));
    for (ParameterSlot& slot : flats_[i]->slots()) {
      const at::Tensor value = values.narrow(0, slot.offset, slot.numel).view(slot.parameter.sizes());
      slot.parameter.mutable_grad().reset();
      slot.parameter.set_data(value.to(flats_[i]->original_dtype(), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

// --- step ---

void ShardedModule::check_outside_backward(const char* operation) const {
  TORCH_CHECK(!is_in_backward_ || !is_autograd_running(), context(operation),
              "called inside a backward; call it after.");
}

void ShardedModule::begin_step() {
  check_outside_backward("step");
  TORCH_CHECK(full_depth_ == 0, context("step"), "called inside full_parameters; call it after.");
  TORCH_CHECK(!is_updating_, context("step"), "called while masters are written; call it after.");
  recover_from_broken_backward();
  forward_depth_ = 0;
  reshard_units();  // a forward without backward leaves units whole, with the values of before the step
  begin_update("step");
  is_updating_ = true;
}

std::vector<FlatParameter*> ShardedModule::all_flats() const {
  std::vector<FlatParameter*> all;
  for (const auto& flat : flats_) {
    all.push_back(flat.get());
  }
  return all;
}

void ShardedModule::end_step() {
  for (const auto& flat : flats_) {
    for (const ParameterSlot& slot : flat->slots()) {
      if (slot.parameter.grad().defined()) {
        slot.parameter.unsafeGetTensorImpl()->bump_version();  // autograd refuses graphs of before the step
      }
    }
  }
  at::NoGradGuard no_grad;
  is_updating_ = false;
  fetch_->end_update(all_flats());
}

at::Tensor ShardedModule::gradient(int64_t index) {
  recover_from_broken_backward();
  TORCH_CHECK(!is_in_backward_, context("step"), "called inside a backward; call it after.");
  reducer_->check_not_lost(context("step"));
  TORCH_CHECK(
      !reducer_->has_unreduced_gradients(), context("step"),
      "gradients were accumulated inside no_sync and have not been reduced; expected the last backward before a "
      "step to run outside of zeropg.no_sync(model).");
  return reducer_->gradient(*flats_[index]);
}

bool ShardedModule::has_gradient(int64_t index, int64_t slot) const {
  return reducer_->has_gradient(*flats_[index], slot);
}

void ShardedModule::zero_gradients() {
  recover_from_broken_backward();
  reducer_->zero();
}

void ShardedModule::scale_gradients(double factor) {
  at::NoGradGuard no_grad;
  recover_from_broken_backward();
  reducer_->scale(factor);
}

void ShardedModule::show_full_gradients() {
  recover_from_broken_backward();
  TORCH_CHECK(!is_in_backward_, context("full_gradients"), "called inside a backward; call it after.");
  reducer_->check_not_lost(context("full_gradients"));
  TORCH_CHECK(!reducer_->has_unreduced_gradients(), context("full_gradients"),
              "gradients were accumulated inside no_sync and have not been reduced; expected the last backward before "
              "it to run outside of zeropg.no_sync(model).");
  reducer_->show_full();
}

void ShardedModule::hide_full_gradients() { reducer_->hide_full(); }

double ShardedModule::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  at::NoGradGuard no_grad;
  std::vector<int64_t> trainable;
  for (size_t i = 0; i < flats_.size(); ++i) {
    if (flats_[i]->is_trainable()) {
      trainable.push_back(static_cast<int64_t>(i));
    }
  }
  // One value per flat parameter and rank, of the slice that the rank owns in every stage.
  const int64_t count = static_cast<int64_t>(trainable.size());
  at::Tensor mine = at::zeros({count}, at::kDouble);
  for (int64_t i = 0; i < count; ++i) {
    const FlatParameter& flat = *flats_[trainable[i]];
    const at::Tensor averaged = gradient(trainable[i]);
    if (averaged.defined()) {
      const at::Tensor slice = averaged.narrow(0, flat.shard_start() - flat.master_start, flat.layout().shard_numel);
      mine.mutable_data_ptr<double>()[i] = norm_contribution(slice, norm_type);
    }
  }
  at::Tensor everybodys = mine;
  if (world_size() > 1 && count > 0) {
    const c10::Device device = flats_.front()->device();
    everybodys = at::empty({world_size() * count}, mine.options().device(device));
    communicator_.wait(communicator_.all_gather(everybodys, mine.to(device)));
    everybodys = everybodys.cpu();
  }
  const double* values = everybodys.const_data_ptr<double>();
  const double norm = combine_norms(std::vector<double>(values, values + everybodys.numel()), norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm), context("clip_grad_norm_"), "the total norm of order ",
              norm_type, " is ", norm,
              "; expected a finite number. To scale by it anyway pass error_if_nonfinite=False.");
  const double coefficient = max_norm / (norm + 1e-6);
  if (!(coefficient >= 1.0)) {
    reducer_->scale(coefficient);
  }
  return norm;
}

// --- facts ---

std::map<std::string, int64_t> ShardedModule::memory_report() const {
  const Fetch::Memory memory = fetch_->memory();
  int64_t masters = 0;
  for (const auto& flat : flats_) {
    masters += flat->resident_master_bytes();
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

std::vector<std::string> ShardedModule::changed_parameters() { return ledger_->take_over_replaced(); }

void ShardedModule::notice_unfrozen() {
  for (const auto& flat : flats_) {
    const auto& slots = flat->slots();
    if (!flat->is_trainable() && std::any_of(slots.begin(), slots.end(), [](const ParameterSlot& slot) {
          return slot.parameter.requires_grad();
        })) {
      flat->make_trainable(options_);
    }
  }
  reducer_->notice_unfrozen();
}

}  // namespace zeropg

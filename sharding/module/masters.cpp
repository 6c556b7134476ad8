#include "sharding/module/masters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <span>

#include "sharding/comm/digest.h"
#include "sharding/parameters/master.h"

namespace zeropg {

const char* const kReplicasDiffer =
    "the replicas of a slice wrote different values to their masters; expected the same program on every rank. Values "
    "of the first replica were kept. Compute what is written from the same numbers on every rank "
    "(torch.distributed.broadcast or all_reduce them first).";

namespace {

const char* const kReplicasDrifted =
    "the replicas of a slice have different masters since an earlier step: single ranks changed gradients, options of "
    "param groups (a learning rate) or optimizer state, or an optimizer rounds differently on their processors; "
    "expected the same on every rank. Weights of the first replica were kept. Decide from numbers that all ranks have "
    "(torch.distributed.all_reduce a loss before a scheduler sees it), and go on from a checkpoint.";

const char* const kRanksDrifted =
    "the ranks have different masters since an earlier step: in stage 0 each rank updates all of them, and single "
    "ranks changed gradients or optimizer state, or an optimizer rounds differently on their processors (stage 1 has "
    "no such differences); expected the same on every rank. All have one model again, of a slice of each rank's. Go on "
    "from a checkpoint that was saved before, and decide from numbers that all ranks have.";

const char* const kOtherOptions =
    "param groups of other numbers (a learning rate, a weight decay, how many parameters they hold)";
const char* const kOtherGradients = "gradients of other parameters";
const char* const kDecideAlike =
    "; expected the same on every rank, and nothing was stepped. Decide from numbers that all ranks have "
    "(torch.distributed.all_reduce a loss before a scheduler sees it), and drop a gradient on all ranks or on none.";

constexpr int64_t kSamplesPerSlot = 64;

// Of every rank, as Communicator::gather_values: what replicas compare.
struct Told {
  enum Column { kNews, kIsSameOnShards, kShard, kDigest };
  at::Tensor rows;

  int64_t at(int64_t rank, Column column) const { return rows.const_data_ptr<int64_t>()[rank * rows.size(1) + column]; }

  // Whether all ranks have written the same.
  bool is_same_news() const {
    bool is_same = true;
    for (int64_t rank = 0; rank < rows.size(0); ++rank) {
      is_same &= at(rank, kNews) == at(0, kNews) && at(rank, kIsSameOnShards) == 1;
    }
    return is_same;
  }

  // Whether the ranks of each shard have the same digest.
  bool is_same_on_replicas() const {
    std::map<int64_t, int64_t> digests;
    bool is_same = true;
    for (int64_t rank = 0; rank < rows.size(0); ++rank) {
      is_same &= digests.try_emplace(at(rank, kShard), at(rank, kDigest)).first->second == at(rank, kDigest);
    }
    return is_same;
  }
};

// What a rank tells of a failure of another one.
struct FailureElsewhere {
  const char* operation;
  const char* could_not;
  int code;
};

// Throws `failure`, or that of another rank: what a disk refuses to one must be an error on all of them, those that
// have another part of the model's tensors too, before they wait for each other. Collective with offload.
void throw_together(Communicator& communicator, const ShardingOptions& options, const Units& units,
                    const std::exception_ptr& failure, const FailureElsewhere& elsewhere) {
  const bool has_parts = communicator.groups().parts != nullptr;
  if (options.optimizer_offload != nullptr && (communicator.world_size() > 1 || has_parts) && !units.flats().empty()) {
    const std::array<int64_t, 1> mine = {failure == nullptr ? 0 : 1};
    const c10::Device device = units.flats().front()->device();
    const at::Tensor all =
        has_parts ? gather_values_of_parts(communicator, mine, device) : communicator.gather_values(mine, device);
    if (failure == nullptr && all.max().item<int64_t>() > 0) {
      throw TierError(c10::str(communicator.context(elsewhere.operation), "rank ", all.argmax().item<int64_t>(),
                               has_parts ? " of all that have parts of the model's tensors" : "", " could not ",
                               elsewhere.could_not, " its masters; see its error."),
                      elsewhere.code);
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

std::exception_ptr failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void reserve_masters(Communicator& communicator, const ShardingOptions& options, const Units& units) {
  const std::exception_ptr failure = failure_of([&] {
    for (const auto& flat : units.flats()) {
      reserve_master(*flat, options);
    }
  });
  throw_together(communicator, options, units, failure, {"fully_shard", "reserve room for", ENOSPC});
}

void Masters::fail_together(const std::exception_ptr& failure, const char* operation, const char* could_not, int code) {
  throw_together(communicator_, options_, units_, failure, {operation, could_not, code});
}

void Masters::settle(const char* operation) {
  if (whole_units_.is_full_for_reading()) {
    return;  // nothing could be written, and what a forward inside wrote is settled after it
  }
  if (whole_units_.full_depth() == 0) {
    whole_units_.reshard_all();
  }
  begin_update(operation);
  if (options_.stage.shards_parameters) {  // where they are replicated, all ranks have the new values by now
    end_update(Fetch::Change::kLoad);
  }
}

void Masters::refresh_own() {
  whole_units_.join();
  if (!options_.stage.shards_parameters) {  // where other ranks read what this one would write, ranks must meet first
    apply(whole_units_.ledger().own_writes());
  }
}

// In one model of all ranks, where a rank that dropped a gradient would leave its slice of the parameter as it was and
// the others would step theirs. Numbers of the gradients themselves are not compared.
void Masters::check_plans(const char* operation, const StepPlan& plan) {
  const at::Tensor all = communicator_.gather_values({plan.options.first, plan.options.second, plan.gradients},
                                                     units_.flats().front()->device());
  const auto of = [&](int64_t rank) { return std::span(all.const_data_ptr<int64_t>() + 3 * rank, 3); };
  for (int64_t rank = 1; rank < all.size(0); ++rank) {
    TORCH_CHECK((of(rank)[0] == 0) == (of(0)[0] == 0), communicator_.context(operation), "rank ",
                of(0)[0] == 0 ? rank : 0, " steps while rank ", of(0)[0] == 0 ? 0 : rank,
                " loads or writes masters; expected the same calls on every rank.");
    const bool has_same_options = of(rank)[0] == of(0)[0] || of(rank)[1] == of(0)[1];
    const char* const what = !has_same_options ? kOtherOptions : of(rank)[2] != of(0)[2] ? kOtherGradients : nullptr;
    TORCH_CHECK(what == nullptr, communicator_.context(operation), "rank ", rank, " steps with ", what, " than rank 0",
                kDecideAlike);
  }
}

// Ranks that have other parts of the model's tensors would step them with other numbers, or wait for this rank's for
// ever. Where this rank's part has no failure all of its ranks have one plan: check_plans.
void Masters::check_parts(const char* operation, const StepPlan& plan, const std::exception_ptr& failure) {
  const std::array<int64_t, 4> mine = {plan.options.first, plan.options.second, plan.gradients, failure ? 1 : 0};
  const at::Tensor all = gather_values_of_parts(communicator_, mine, units_.flats().front()->device());
  if (failure != nullptr) std::rethrow_exception(failure);
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto its = std::span(all.const_data_ptr<int64_t>() + mine.size() * rank, mine.size());
    TORCH_CHECK(its[3] == 0, communicator_.context(operation), "ranks that have another part of the model's tensors ",
                "failed (", rank, " of all ", all.size(0), "); see their error. Nothing was stepped.");
    TORCH_CHECK(its[0] == mine[0] || its[1] == mine[1], communicator_.context(operation), "ranks that have another ",
                "part of the model's tensors step with ", kOtherOptions, kDecideAlike);
    TORCH_CHECK(its[2] == mine[2], communicator_.context(operation), "ranks that have another part of the model's ",
                "tensors step with ", kOtherGradients, kDecideAlike);
  }
}

// On a device the samples would make the host wait for each step.
bool Masters::update_everything() const {
  return !options_.stage.shards_optimizer && communicator_.shards() > 1 && communicator_.replicas() == 1 &&
         !units_.flats().empty() && units_.flats().front()->device().is_cpu();
}

void Masters::check_not_drifted(const char* operation) {
  const at::Tensor all = communicator_.gather_values({sample_}, units_.flats().front()->device());
  if (all.eq(all[0]).all().item<bool>()) return;
  publish();
  TORCH_CHECK(false, communicator_.context(operation), kRanksDrifted);
}

bool Masters::begin_fetch_update(const char* operation, int64_t news) {
  try {
    return whole_units_.fetch().begin_update(news);
  } catch (const c10::DistError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str(communicator_.context(operation),
                                               "not every rank calls it, as all must, or one is late or gone (",
                                               error.what_without_backtrace(), ")"));
  }
}

void Masters::begin_update(const char* operation, const StepPlan& plan) {
  const int64_t written = whole_units_.ledger().digest();
  const int64_t left = update_everything() && !plan.is_load ? sample_ : 0;
  const std::array<int64_t, 5> parts = {written, left, plan.options.first, plan.options.second, plan.gradients};
  const int64_t news = left != 0 || plan.options.first != 0
                           ? static_cast<int64_t>(digest(std::as_bytes(std::span(parts))) | 1U)
                           : written;
  const bool is_same_on_shards = begin_fetch_update(operation, news);
  std::exception_ptr failure = failure_of([&] {
    // What ranks have written, and what their steps have left (Note [Drift]).
    bool is_same = is_same_on_shards;
    bool has_drifted = false;
    if (communicator_.replicas() > 1 && !units_.flats().empty()) {
      const Told told{communicator_.gather_values({news, is_same_on_shards ? 1 : 0, communicator_.shard(), sample_},
                                                  units_.flats().front()->device())};
      is_same = told.is_same_news();
      has_drifted = !told.is_same_on_replicas();
    }
    if (!is_same && !units_.flats().empty()) {
      check_plans(operation, plan);
      if (left != 0) check_not_drifted(operation);
    }
    const WriteLedger::Settlement settlement = whole_units_.ledger().settle(is_same, operation);
    if (!settlement.changes.empty()) {
      fail_together(failure_of([&] { apply(settlement.changes); }), operation, "read and write", EIO);
    }
    // Masters that single ranks may have changed.
    const bool may_differ = settlement.may_have_written_shards || has_drifted;
    const bool are_replicas_same = !may_differ || unite_replicas(operation);
    if (may_differ) {
      publish();
    }
    TORCH_CHECK(settlement.conflict.empty(), communicator_.context(operation), settlement.conflict);
    TORCH_CHECK(!has_drifted, communicator_.context(operation), kReplicasDrifted);
    TORCH_CHECK(are_replicas_same, communicator_.context(operation), kReplicasDiffer);
  });
  if (communicator_.groups().parts != nullptr && plan.options.first != 0) {
    failure = failure_of([&] { check_parts(operation, plan, failure); });
  }
  if (failure != nullptr) {
    sample_ = 0;
    if (options_.stage.shards_parameters) {
      end_update(Fetch::Change::kLoad);  // the other ranks are waiting in theirs
    }
    std::rethrow_exception(failure);
  }
}

void Masters::end_update(Fetch::Change change) {
  const bool is_step = change != Fetch::Change::kLoad;
  steps_ += is_step ? 1 : 0;
  sample_ = is_step && (communicator_.replicas() > 1 || update_everything()) ? sample() : 0;
  whole_units_.end_update(change);
}

// Note [Drift]
// Replicas compute the same from the same averages, unless a rank decides something alone between a backward and its
// step: it changes a gradient, a learning rate, a state. To compare all masters would be one more pass over memory. So
// each step leaves a digest of some elements of every parameter, others at each step, and the next update compares it:
// in the next step, what changed all elements of a parameter, or a small one; the rest when its elements have their
// turn. Masters in a file are not read for it; the parameters computed with are.
int64_t Masters::sample() const {
  at::NoGradGuard no_grad;
  uint64_t digest_of_all = 1;
  for (const auto& flat : units_.flats()) {
    const at::Tensor& values = flat->master.values.defined() ? flat->master.values : flat->parameter_out;
    if (!values.defined() || !flat->is_trainable()) {
      continue;
    }
    std::vector<at::Tensor> samples;
    for (const SlotRange& range : flat->slots_in(flat->master.start, flat->master.start + flat->master.numel)) {
      const int64_t numel = range.stop - range.start;
      const int64_t stride = (numel + kSamplesPerSlot - 1) / kSamplesPerSlot;
      const at::Tensor part = values.narrow(0, range.flat_start - flat->master.start, numel);
      samples.push_back(part.slice(0, steps_ % stride, numel, stride));
    }
    if (!samples.empty()) {
      digest_of_all = digest_of(at::cat(samples), digest_of_all);
    }
  }
  return static_cast<int64_t>(digest_of_all);
}

bool Masters::unite_replicas(const char* operation) {
  if (communicator_.replicas() == 1 || units_.flats().empty()) {
    return true;
  }
  at::NoGradGuard no_grad;
  uint64_t digest_of_all = 0;
  const std::exception_ptr failure = failure_of([&] {
    for (const auto& flat : units_.flats()) {
      for_each_master_piece(*flat, 0, flat->master.numel,
                            [&](int64_t, const at::Tensor& piece) { digest_of_all = digest_of(piece, digest_of_all); });
    }
  });
  fail_together(failure, operation, "read", EIO);
  const Told told{communicator_.gather_values({0, 1, communicator_.shard(), static_cast<int64_t>(digest_of_all)},
                                              units_.flats().front()->device())};
  if (told.is_same_on_replicas()) {
    return true;
  }
  for (const auto& flat : units_.flats()) {
    const at::Tensor read = flat->master.read(0, flat->master.numel);
    const at::Tensor values = read.to(flat->device(), /*non_blocking=*/false, /*copy=*/true);
    communicator_.wait(communicator_.broadcast_to_replicas(values));
    flat->master.write(0, values);
    if (flat->parameter_out.defined()) {
      flat->parameter_out.copy_(values);
    }
  }
  return false;
}

void Masters::publish() {
  at::NoGradGuard no_grad;
  for (const auto& flat : units_.flats()) {
    const at::Tensor own = flat->master.read(flat->shard_start() - flat->master.start,
                                             flat->shard_start() - flat->master.start + flat->layout().shard_numel);
    if (flat->parameter_out.defined()) {
      flat->parameter_out.narrow(0, flat->shard_start() - flat->master.start, own.numel()).copy_(own);
    }
    if (options_.stage.shards_parameters || communicator_.shards() == 1) {
      continue;
    }
    const at::Tensor part = flat->whole().narrow(0, flat->shard_start(), flat->layout().shard_numel);
    if (flat->sends_differences()) {
      part.copy_(own);
    }
    communicator_.wait(communicator_.gather_slices(flat->whole(), part));
    if (!flat->is_own_master() && flat->master.numel == flat->layout().total_numel) {
      const at::Tensor whole = gather_slices(own.to(flat->device()));
      flat->master.write(0, whole);
    }
  }
}

// Inside an update.
void Masters::apply(const std::vector<WriteLedger::Change>& changes) {
  at::NoGradGuard no_grad;
  for (const WriteLedger::Change& change : changes) {
    FlatParameter& flat = *change.flat;
    const ParameterSlot& slot = flat.slots()[change.slot];
    // This rank's part of the parameter: elements [start, stop) of the masters.
    const int64_t start = std::clamp<int64_t>(slot.offset - flat.master.start, 0, flat.master.numel);
    const int64_t stop = std::clamp<int64_t>(slot.offset + slot.numel - flat.master.start, 0, flat.master.numel);
    if (start == stop) {
      continue;
    }
    if (flat.is_attached()) {
      const int64_t first = flat.master.start + start;
      const at::Tensor written = flat.whole().narrow(0, first, stop - start);
      if (!flat.sends_differences()) {
        write_back(flat, start, written, at::Tensor());
      } else if (change.before.defined()) {
        write_back(flat, start, written, change.before.narrow(0, first - slot.offset, stop - start));
      }
      continue;
    }
    const at::Tensor places = change.positions + (slot.offset - flat.master.start);
    const at::Tensor is_mine = places.ge(start).logical_and(places.lt(stop));
    const at::Tensor& home = flat.is_own_master() ? flat.master.values : flat.parameter_out;
    const at::Tensor written = home.narrow(0, start, stop - start).clone();
    written.index_copy_(0, places.masked_select(is_mine) - start, change.values.masked_select(is_mine));
    write_back(flat, start, written, at::Tensor());
  }
}

// Sets this rank's masters from element `start` on to what the parameter has there. `unwritten`: what it had there
// before the write; undefined: the masters, rounded.
void Masters::write_back(FlatParameter& flat, int64_t start, const at::Tensor& written, const at::Tensor& unwritten) {
  if (flat.is_own_master()) {
    if (!written.is_alias_of(flat.master.values)) {
      flat.master.values.narrow(0, start, written.numel()).copy_(written);
    }
    return;
  }
  // A master is more precise than what the user saw, so it changes only where the user changed something.
  for_each_master_piece(flat, start, start + written.numel(), [&](int64_t first, const at::Tensor& piece) {
    const at::Tensor after = written.narrow(0, first - start, piece.numel()).to(piece.device());
    const at::Tensor before =
        unwritten.defined() ? unwritten.narrow(0, first - start, piece.numel()) : piece.to(flat.dtype());
    const at::Tensor is_changed = before.ne(after).logical_and(before.eq(before).logical_or(after.eq(after)));
    flat.master.write(first, at::where(is_changed, after.to(flat.master_dtype()), piece));
  });
  if (flat.parameter_out.defined() && !written.is_alias_of(flat.parameter_out)) {
    flat.parameter_out.narrow(0, start, written.numel()).copy_(written);
  }
}

void Masters::load(int64_t index, int64_t slot_index, const at::Tensor& value, int64_t first) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *units_.flats()[index];
  const at::Tensor values = value.detach().reshape({-1});
  const ParameterSlot& slot = flat.slots().at(slot_index);
  TORCH_CHECK_VALUE(first >= 0 && values.numel() <= slot.numel - first, communicator_.context("load"), "elements [",
                    first, ", ", first + values.numel(), ") of '", slot.names.front(), "', which has ", slot.numel);
  for (const SlotRange& range : flat.slots_in(flat.master.start, flat.master.start + flat.master.numel)) {
    const int64_t from = std::max(range.start, first);
    const int64_t to = std::min(range.stop, first + values.numel());
    if (range.slot == slot_index && from < to) {
      const int64_t start = range.flat_start + (from - range.start) - flat.master.start;
      const at::Tensor part = values.narrow(0, from - first, to - from).to(flat.master_dtype());
      flat.master.write(start, part);
      if (flat.parameter_out.defined()) {
        flat.parameter_out.narrow(0, start, part.numel()).copy_(part);
      }
    }
  }
}

at::Tensor Masters::gather(int64_t index) {
  at::NoGradGuard no_grad;
  FlatParameter& flat = *units_.flats()[index];
  at::Tensor mine;
  const std::exception_ptr failure = failure_of([&] { mine = flat.master.read(0, flat.master.numel); });
  fail_together(failure, "full_state_dict", "read", EIO);
  return flat.master.numel == flat.layout().total_numel ? mine : gather_slices(mine.to(flat.device()));
}

// [shards * n] of every shard's [n].
at::Tensor Masters::gather_slices(const at::Tensor& mine) {
  at::Tensor whole = at::empty({communicator_.shards() * mine.numel()}, mine.options());
  communicator_.wait(communicator_.gather_slices(whole, mine));
  return whole;
}

}  // namespace zeropg

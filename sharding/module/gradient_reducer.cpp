#include "sharding/module/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "sharding/module/grad_view.h"

namespace zeropg {
namespace {

// Buckets on the wire at once: one being reduced while the next is filled. More would only hold memory.
constexpr int64_t kMaxInFlight = 2;

using GradientAccumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

class LambdaPreHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<void()> function) : function_(std::move(function)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    function_();
    return gradients;
  }

 private:
  std::function<void()> function_;
};

std::string unreadable_message(const std::string& name) {
  return "[zeropg] the gradient of '" + name +
         "' is sharded: each rank holds a part of it. Clip with zeropg.clip_grad_norm_(model, max_norm); read it whole "
         "inside `with zeropg.full_gradients(model):`.";
}

std::string unreduced_message(const std::string& name) {
  return "[zeropg] the gradient of '" + name +
         "' is not reduced yet: zeropg.no_sync(model) has added to an earlier one. Read it after a backward outside of "
         "no_sync.";
}

// Residuals have the names of parameters: buckets depend on units, stage and world.
Compression compression_of(const FlatParameter& flat, const ShardingOptions& options) {
  Compression compression{.codec = options.codec, .residuals = options.residuals, .ranges = {}};
  if (options.residuals == nullptr) {
    return compression;
  }
  int64_t end = 0;
  for (const ParameterSlot& slot : flat.slots()) {
    compression.ranges.push_back({"", 0, slot.offset - end});
    compression.ranges.push_back({slot.names.front(), 0, slot.numel});
    end = slot.offset + slot.numel;
  }
  compression.ranges.push_back({"", 0, flat.layout().total_numel - end});
  return compression;
}

}  // namespace

struct GradientReducer::Slot {
  int64_t index = 0;
  GradientAccumulator accumulator;  // the parameter holds it weakly, the hooks live on it
  GradView view;                    // what `.grad` is after a backward
  bool is_full = false;             // `.grad` is what show_full has put there, or the user after it
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> users_hook;  // taken away until backward has ended
  at::Tensor taken_away;           // what `.grad` showed, while autograd puts another there
  bool had_gradient = false;       // when this backward began
  bool arrived = false;            // in this backward
  bool arrived_somewhere = false;  // on some rank, in this backward
  bool is_filled = false;          // the open bucket holds a gradient of this slot
  bool has_gradient = false;       // some rank contributed since the gradient was last dropped
};

struct GradientReducer::Bucket {
  FlatParameter* flat = nullptr;
  Compression compression;
  std::vector<Slot> slots;
  bool is_active = false;  // the flat is trainable
  int64_t expected = 0;    // slots that may get a gradient in this backward
  int64_t arrived = 0;
  bool is_held = false;  // until the end of this backward
  bool is_launched = false;
  bool is_finished = false;
  at::Tensor buffer;   // [total_numel]: local gradients; stays open over backwards inside no_sync
  at::Tensor reduced;  // what the running work writes: a slice, or the buffer itself
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor kept;       // averaged gradient, master dtype: a slice, or whole where gradients are replicated
  size_t kept_uses = 0;  // of its storage by us alone
  bool is_kept_valid = false;
};

GradientReducer::GradientReducer(Communicator& communicator, const ShardingOptions& options,
                                 const std::vector<FlatParameter*>& flats, DuringBackward during_backward)
    : communicator_(communicator),
      options_(options),
      pool_([&communicator](int64_t bytes, c10::Device device) { return communicator.allocate(bytes, device); }),
      during_backward_(during_backward) {
  for (FlatParameter* flat : flats) {
    Bucket bucket;
    bucket.flat = flat;
    bucket.slots.resize(flat->slots().size());
    for (size_t i = 0; i < bucket.slots.size(); ++i) {
      bucket.slots[i].index = static_cast<int64_t>(i);
    }
    buckets_.push_back(std::move(bucket));
  }
}

GradientReducer::~GradientReducer() = default;

void GradientReducer::install(const std::weak_ptr<void>& alive, std::function<void(FlatParameter&)> on_backward,
                              std::function<void(FlatParameter&)> on_gradient) {
  alive_ = alive;
  on_backward_ = std::move(on_backward);
  on_gradient_ = std::move(on_gradient);
  for (Bucket& bucket : buckets_) {
    if (bucket.flat->is_trainable()) {
      install(bucket);
    }
  }
}

void GradientReducer::notice_unfrozen() {
  for (Bucket& bucket : buckets_) {
    if (bucket.flat->is_trainable()) {
      install(bucket);
    }
  }
}

void GradientReducer::install(Bucket& bucket) {
  if (!bucket.is_active) {
    bucket.is_active = true;
    bucket.compression = compression_of(*bucket.flat, options_);
  }
  for (Slot& slot : bucket.slots) {
    const at::Tensor& parameter = bucket.flat->slots()[slot.index].parameter;
    // torch makes a new accumulator where a parameter's data was set (p.set_(), another dtype and back).
    if (!parameter.requires_grad() ||
        (slot.accumulator != nullptr &&
         slot.accumulator == torch::autograd::impl::try_get_grad_accumulator(parameter))) {
      continue;
    }
    if (!bucket.flat->is_own_master()) {
      parameter.set_grad_dtype(std::nullopt);  // `.grad` has the masters' dtype, and users may assign either
    }
    slot.accumulator = torch::autograd::impl::grad_accumulator(parameter);
    slot.accumulator->add_pre_hook(std::make_unique<LambdaPreHook>([this, alive = alive_, &bucket, &slot] {
      if (const auto locked = alive.lock()) {
        on_backward_(*bucket.flat);
        const at::Tensor& mine = bucket.flat->slots()[slot.index].parameter;
        if (slot.view.is_shown(mine)) {
          slot.taken_away = std::exchange(mine.mutable_grad(), at::Tensor());
        }
        auto& hook = torch::autograd::impl::post_acc_grad_hooks(mine);
        if (hook != nullptr) {
          slot.users_hook = std::move(hook);
        }
      }
    }));
    slot.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, alive = alive_, &bucket, &slot](const torch::autograd::variable_list& outputs,
                                               const torch::autograd::variable_list&) {
          if (const auto locked = alive.lock()) {
            take_gradient(bucket, slot);
            on_gradient_(*bucket.flat);
          }
          return outputs;
        }));
  }
}

void GradientReducer::hold_until_end(const FlatParameter& flat) { bucket_of(flat).is_held = true; }

int64_t GradientReducer::kept_start(const Bucket& bucket) const {
  return options_.stage.shards_gradients ? bucket.flat->shard_start() : 0;
}

int64_t GradientReducer::kept_numel(const Bucket& bucket) const {
  const FlatLayout& layout = bucket.flat->layout();
  return options_.stage.shards_gradients ? layout.shard_numel : layout.total_numel;
}

// The part of a slot that this rank keeps; it begins at element `start` of the flattened parameter.
at::Tensor GradientReducer::kept_part(const Bucket& bucket, const Slot& slot, int64_t* start) const {
  const ParameterSlot& parameter_slot = bucket.flat->slots()[slot.index];
  const int64_t begin = kept_start(bucket);
  const int64_t end = begin + kept_numel(bucket);
  const int64_t from = std::clamp(parameter_slot.offset, begin, end);
  const int64_t to = std::clamp(parameter_slot.offset + parameter_slot.numel, begin, end);
  if (start != nullptr) {
    *start = std::min(from - std::min(from, parameter_slot.offset), parameter_slot.numel);
  }
  return bucket.kept.narrow(0, from - begin, to - from);
}

void GradientReducer::begin_backward(bool synchronize) {
  synchronize_ = synchronize;
  next_to_launch_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.arrived = 0;
    bucket.expected = 0;
    bucket.is_held = false;
    bucket.is_launched = false;
    bucket.is_finished = false;
    for (Slot& slot : bucket.slots) {
      slot.arrived = false;
      slot.arrived_somewhere = false;
      bucket.expected += bucket.flat->slots()[slot.index].parameter.requires_grad() ? 1 : 0;
    }
  }
  for (Bucket& bucket : buckets_) {
    absorb(bucket);
    for (Slot& slot : bucket.slots) {
      slot.had_gradient = slot.has_gradient || slot.is_filled;
    }
  }
}

// Takes over what the user did to `.grad` since the last backward.
void GradientReducer::absorb(Bucket& bucket) {
  if (is_showing_full_ || !bucket.is_active) {
    return;
  }
  at::NoGradGuard no_grad;
  const auto& places = bucket.flat->slots();
  if (std::none_of(places.begin(), places.end(),
                   [](const ParameterSlot& place) { return place.parameter.grad().defined(); })) {
    for (Slot& slot : bucket.slots) {
      slot.has_gradient = false;
      slot.is_filled = false;
      slot.view.forget();
    }
    bucket.is_kept_valid = false;
    release_buffer(bucket);
    return;
  }
  for (Slot& slot : bucket.slots) {
    const at::Tensor& parameter = places[slot.index].parameter;
    if (!parameter.grad().defined()) {
      drop(bucket, slot);
      slot.view.forget();
    } else if (slot.view.is_lost(parameter)) {
      drop(bucket, slot);
    } else if (!slot.view.is_shown(parameter)) {
      replace(bucket, slot, parameter.grad());
    }
  }
}

at::Tensor GradientReducer::make_kept(const Bucket& bucket) {
  const auto options = at::TensorOptions().dtype(bucket.flat->master_dtype()).device(bucket.flat->device());
  if (options_.stage.shards_gradients) {
    return at::zeros({kept_numel(bucket)}, options);
  }
  // Reduced where it is.
  const int64_t bytes = kept_numel(bucket) * static_cast<int64_t>(options.dtype().itemsize());
  return communicator_.allocate(bytes, bucket.flat->device()).view(bucket.flat->master_dtype()).zero_();
}

// Whether somebody else has a tensor in the kept gradient's memory that `.grad` does not show any more.
bool GradientReducer::has_users(const Bucket& bucket) {
  if (options_.stage.shards_gradients || !bucket.kept.defined()) {
    return false;
  }
  size_t ours = bucket.kept_uses;
  for (const Slot& slot : bucket.slots) {
    const at::Tensor& parameter = bucket.flat->slots()[slot.index].parameter;
    if (slot.view.is_shown(parameter)) {
      ++ours;
    }
  }
  return bucket.kept.storage().use_count() > ours;
}

// Makes room for a gradient where none is kept.
void GradientReducer::renew_kept(Bucket& bucket) {
  if (!bucket.kept.defined()) {
    bucket.kept = make_kept(bucket);
    bucket.kept_uses = bucket.kept.storage().use_count();
  }
  leave_kept_to_users(bucket, /*keeps_values=*/false);
}

// Before the kept gradient gets other values: what users have of the old ones stays as it is.
void GradientReducer::leave_kept_to_users(Bucket& bucket, bool keeps_values) {
  if (!has_users(bucket)) {
    return;
  }
  const at::Tensor before = bucket.kept;
  bucket.kept = make_kept(bucket);
  bucket.kept_uses = bucket.kept.storage().use_count();
  if (!keeps_values) {
    return;
  }
  bucket.kept.copy_(before);
  for (Slot& slot : bucket.slots) {
    const ParameterSlot& place = bucket.flat->slots()[slot.index];
    if (slot.view.is_shown(place.parameter)) {
      slot.view.move_to(bucket.kept.narrow(0, place.offset, place.numel));
    }
  }
}

void GradientReducer::drop(Bucket& bucket, Slot& slot) {
  if (slot.has_gradient && bucket.is_kept_valid) {
    leave_kept_to_users(bucket, /*keeps_values=*/true);
    kept_part(bucket, slot, nullptr).zero_();
  }
  slot.has_gradient = false;
  slot.is_filled = false;
}

void GradientReducer::replace(Bucket& bucket, Slot& slot, const at::Tensor& theirs) {
  const ParameterSlot& parameter_slot = bucket.flat->slots()[slot.index];
  const at::Tensor values = (theirs.is_sparse() ? theirs.to_dense() : theirs.detach()).reshape({-1});
  if (bucket.buffer.defined()) {  // not reduced yet: it takes the place of the sum so far
    drop(bucket, slot);
    bucket.buffer.narrow(0, parameter_slot.offset, parameter_slot.numel).copy_(values);
    slot.is_filled = true;
  } else {
    if (!bucket.is_kept_valid) {
      renew_kept(bucket);
      bucket.kept.zero_();
    }
    leave_kept_to_users(bucket, /*keeps_values=*/true);
    bucket.is_kept_valid = true;
    int64_t start = 0;
    const at::Tensor part = kept_part(bucket, slot, &start);
    part.copy_(values.narrow(0, start, part.numel()));
    slot.has_gradient = true;
  }
  show(bucket, slot);
}

void GradientReducer::open(Bucket& bucket) {
  FlatParameter& flat = *bucket.flat;
  const FlatLayout& layout = flat.layout();
  if (!bucket.is_kept_valid) {
    renew_kept(bucket);
  }
  // Inside no_sync gradients of several backwards are summed here, so they get the master's precision.
  const auto dtype = synchronize_ ? options_.reduce_dtype.value_or(flat.master_dtype()) : flat.master_dtype();
  const bool in_place = !options_.stage.shards_gradients && !bucket.is_kept_valid && dtype == flat.master_dtype();
  bucket.buffer = in_place ? bucket.kept : pool_.acquire(layout.total_numel, dtype, flat.device());
  int64_t end = 0;  // padding takes part in sums and norms, so it must be zero
  for (const ParameterSlot& slot : flat.slots()) {
    bucket.buffer.narrow(0, end, slot.offset - end).zero_();
    end = slot.offset + slot.numel;
  }
  bucket.buffer.narrow(0, end, layout.total_numel - end).zero_();
  for (Slot& slot : bucket.slots) {
    slot.is_filled = false;
  }
}

void GradientReducer::release_buffer(Bucket& bucket) {
  if (bucket.buffer.defined() && !bucket.buffer.is_alias_of(bucket.kept)) {
    pool_.release(bucket.buffer);
  }
  bucket.buffer.reset();
}

void GradientReducer::take_gradient(Bucket& bucket, Slot& slot) {
  at::NoGradGuard no_grad;
  const ParameterSlot& parameter_slot = bucket.flat->slots()[slot.index];
  at::Tensor gradient = parameter_slot.parameter.grad();
  if (!gradient.defined() || slot.view.is_shown(parameter_slot.parameter)) {
    return;
  }
  TORCH_CHECK(
      !gradient.requires_grad(), "[zeropg rank ", communicator_.rank(), "/", communicator_.world_size(),
      "] backward(create_graph=True): the gradient of '", parameter_slot.names.front(),
      "' has a graph, which its average over the ranks cannot have, so a penalty on `.grad` would be lost. Take "
      "it from torch.autograd.grad(loss, inputs, create_graph=True), which does not communicate, add the penalty "
      "to the loss, and call backward() on the sum.");
  TORCH_CHECK(!bucket.is_launched, "[zeropg rank ", communicator_.rank(), "/", communicator_.world_size(),
              "] parameter '", parameter_slot.names.front(),
              "' got a second gradient after its bucket was sent in the same backward; expected one accumulation per "
              "backward. Use torch.utils.checkpoint with use_reentrant=False.");
  if (!bucket.buffer.defined()) {
    finish_some();
    open(bucket);
  }
  at::Tensor home = bucket.buffer.narrow(0, parameter_slot.offset, parameter_slot.numel);
  const at::Tensor flat_gradient = (gradient.is_sparse() ? gradient.to_dense() : gradient).reshape({-1});
  if (slot.is_filled) {
    home.add_(flat_gradient);
  } else {
    home.copy_(flat_gradient);
  }
  slot.is_filled = true;
  if (!slot.arrived) {
    slot.arrived = true;
    ++bucket.arrived;
  }
  parameter_slot.parameter.mutable_grad() = std::exchange(slot.taken_away, at::Tensor());
  if (synchronize_ && during_backward_ != DuringBackward::kCollect) {
    launch_ready();
  }
}

void GradientReducer::launch_ready() {
  for (; next_to_launch_ < buckets_.size(); ++next_to_launch_) {
    Bucket& bucket = buckets_[next_to_launch_];
    if (bucket.is_active && (bucket.is_held || bucket.arrived < bucket.expected)) {
      return;
    }
    launch(bucket);
  }
}

void GradientReducer::launch(Bucket& bucket) {
  if (!bucket.is_active) {
    return;
  }
  FlatParameter& flat = *bucket.flat;
  if (!bucket.buffer.defined()) {
    open(bucket);
  }
  for (Slot& slot : bucket.slots) {
    if (!slot.is_filled) {
      const ParameterSlot& parameter_slot = flat.slots()[slot.index];
      bucket.buffer.narrow(0, parameter_slot.offset, parameter_slot.numel).zero_();
    }
  }
  const auto reduce_dtype = options_.reduce_dtype.value_or(flat.master_dtype());
  if (bucket.buffer.scalar_type() != reduce_dtype) {
    at::Tensor cast = pool_.acquire(flat.layout().total_numel, reduce_dtype, flat.device());
    cast.copy_(bucket.buffer);
    release_buffer(bucket);
    bucket.buffer = std::move(cast);
  }
  bucket.is_launched = true;
  bucket.reduced = bucket.buffer;
  if (!options_.stage.shards_gradients) {
    if (communicator_.world_size() > 1 && averages_) {
      bucket.work = communicator_.all_reduce_average(bucket.buffer, bucket.compression);
    }
    return;
  }
  if (communicator_.world_size() > 1) {
    const bool in_place = !bucket.is_kept_valid && reduce_dtype == flat.master_dtype();
    bucket.reduced = in_place ? bucket.kept : pool_.acquire(kept_numel(bucket), reduce_dtype, flat.device());
    bucket.work = communicator_.reduce_scatter_average(bucket.reduced, bucket.buffer, bucket.compression);
  }
}

void GradientReducer::finish_some() {
  int64_t in_flight = 0;
  for (const Bucket& bucket : buckets_) {
    in_flight += bucket.is_launched && !bucket.is_finished ? 1 : 0;
  }
  for (Bucket& bucket : buckets_) {
    if (bucket.is_launched && !bucket.is_finished) {
      const bool may_wait = during_backward_ == DuringBackward::kSendAndWait && in_flight >= kMaxInFlight;
      if (!may_wait && bucket.work && !bucket.work->isCompleted()) {
        return;
      }
      finish(bucket);
      --in_flight;
    }
  }
}

void GradientReducer::finish(Bucket& bucket) {
  if (!bucket.is_active) {
    return;
  }
  if (bucket.work) {
    communicator_.wait(bucket.work);
    bucket.work.reset();
  }
  if (!bucket.reduced.is_alias_of(bucket.kept)) {
    if (bucket.is_kept_valid) {
      bucket.kept.add_(bucket.reduced);
    } else {
      bucket.kept.copy_(bucket.reduced);
    }
    if (!bucket.reduced.is_alias_of(bucket.buffer)) {
      pool_.release(bucket.reduced);
    }
  }
  bucket.reduced.reset();
  release_buffer(bucket);
  bucket.is_kept_valid = true;
  bucket.is_finished = true;
}

bool GradientReducer::finish_backward(uint64_t fingerprint) {
  at::NoGradGuard no_grad;
  bool is_same = true;
  if (synchronize_) {
    for (; next_to_launch_ < buckets_.size(); ++next_to_launch_) {
      launch(buckets_[next_to_launch_]);
    }
    is_same = share_which_slots_have_gradients(fingerprint);
    for (Bucket& bucket : buckets_) {
      if (!bucket.is_finished) {
        finish(bucket);
      }
    }
  }
  if (!is_showing_full_) {
    show_gradients();
  }
  give_hooks_back();
  return is_same;
}

// One small all-reduce (max). A byte and its complement both keep their value only where all ranks have the same byte.
bool GradientReducer::share_which_slots_have_gradients(uint64_t fingerprint) {
  std::vector<uint8_t> filled;
  for (const Bucket& bucket : buckets_) {
    for (const Slot& slot : bucket.slots) {
      filled.push_back(slot.is_filled ? 1 : 0);
    }
  }
  const size_t slot_count = filled.size();
  for (int shift = 0; shift < 64; shift += 8) {
    filled.push_back(static_cast<uint8_t>(fingerprint >> shift));
    filled.push_back(static_cast<uint8_t>(~(fingerprint >> shift)));
  }
  const std::vector<uint8_t> mine = filled;
  if (communicator_.world_size() > 1 && slot_count > 0) {
    const c10::Device device = buckets_.front().flat->device();
    at::Tensor flags = at::empty({static_cast<int64_t>(filled.size())}, at::kByte);
    std::memcpy(flags.mutable_data_ptr(), filled.data(), filled.size());
    flags = flags.to(device);
    communicator_.wait(communicator_.all_reduce_max(flags));
    flags = flags.cpu();
    std::memcpy(filled.data(), flags.const_data_ptr(), filled.size());
  }
  size_t next = 0;
  for (Bucket& bucket : buckets_) {
    for (Slot& slot : bucket.slots) {
      slot.arrived_somewhere = filled[next++] != 0;
      slot.has_gradient |= slot.arrived_somewhere;
    }
  }
  return std::equal(filled.begin() + static_cast<int64_t>(slot_count), filled.end(),
                    mine.begin() + static_cast<int64_t>(slot_count));
}

void GradientReducer::show_gradients() {
  for (Bucket& bucket : buckets_) {
    for (Slot& slot : bucket.slots) {
      if (!slot.has_gradient && !slot.is_filled) {
        continue;
      }
      show(bucket, slot);
    }
  }
}

void GradientReducer::show(Bucket& bucket, Slot& slot) {
  const ParameterSlot& place = bucket.flat->slots()[slot.index];
  if (options_.stage.shards_gradients) {
    slot.view.show_unreadable(place.parameter, unreadable_message(place.names.front()));
  } else if (bucket.buffer.defined() && !bucket.buffer.is_alias_of(bucket.kept)) {
    slot.view.show_unreadable(place.parameter, unreduced_message(place.names.front()));
  } else {
    slot.view.show(place.parameter, bucket.kept.narrow(0, place.offset, place.numel));
  }
}

void GradientReducer::give_hooks_back() {
  for (Bucket& bucket : buckets_) {
    for (Slot& slot : bucket.slots) {
      if (slot.users_hook != nullptr) {
        auto& hook = torch::autograd::impl::post_acc_grad_hooks(bucket.flat->slots()[slot.index].parameter);
        if (hook == nullptr) {
          hook = std::move(slot.users_hook);
        }
        slot.users_hook.reset();
      }
    }
  }
}

void GradientReducer::run_hooks() {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    for (const Slot& slot : bucket.slots) {
      if (!slot.arrived_somewhere) {
        continue;
      }
      const at::Tensor& parameter = bucket.flat->slots()[slot.index].parameter;
      const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
      if (hook != nullptr) {
        (*hook)(parameter);
      }
    }
  }
}

bool GradientReducer::will_accumulate() const {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {
    return true;  // backward() runs all that it reaches; grad(), and backward(inputs=...), what they name
  }
  const auto accumulates = [&](const Slot& slot) {
    const auto found = executed->find(slot.accumulator.get());
    return found != executed->end() && found->second.needed_;
  };
  return std::any_of(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
    return std::any_of(bucket.slots.begin(), bucket.slots.end(), accumulates);
  });
}

void GradientReducer::check_not_lost(const std::string& context) {
  for (const Bucket& bucket : buckets_) {
    for (const Slot& slot : bucket.slots) {
      const ParameterSlot& place = bucket.flat->slots()[slot.index];
      TORCH_CHECK(!slot.view.is_lost(place.parameter), context,
                  "an earlier backward raised an error, and what backwards before it had accumulated of '",
                  place.names.front(),
                  "' went with it; expected zero_grad() after the error. Call it and repeat the accumulation from its "
                  "first backward.");
    }
  }
}

void GradientReducer::abandon_backward() {
  for (Bucket& bucket : buckets_) {
    if (bucket.work) {
      // Where the group has failed, its own error is raised by the next collective. Anything else is what a signal
      // handler raised: the work still runs, so it and its buffers stay until the next call.
      try {
        communicator_.wait(bucket.work);
      } catch (const c10::Error&) {
      } catch (...) {
        if (bucket.work->isCompleted()) {
          bucket.work.reset();
        }
        throw;
      }
      bucket.work.reset();
    }
    if (bucket.reduced.defined() && !bucket.reduced.is_alias_of(bucket.buffer) &&
        !bucket.reduced.is_alias_of(bucket.kept)) {
      pool_.release(bucket.reduced);
    }
    bucket.reduced.reset();
    release_buffer(bucket);
    bucket.is_launched = false;
    bucket.is_kept_valid = false;
    for (Slot& slot : bucket.slots) {
      slot.is_filled = false;
      slot.has_gradient = false;
      const ParameterSlot& place = bucket.flat->slots()[slot.index];
      at::Tensor& gradient = place.parameter.mutable_grad();
      if (slot.taken_away.defined()) {
        gradient = std::exchange(slot.taken_away, at::Tensor());
      }
      if (slot.is_full || slot.view.is_shown(place.parameter)) {
        gradient.reset();
        if (slot.had_gradient) {
          slot.view.show_lost(place.parameter, place.names.front());
        }
      }
      slot.is_full = false;
    }
  }
  give_hooks_back();
  is_showing_full_ = false;
  next_to_launch_ = 0;
}

GradientReducer::Bucket& GradientReducer::bucket_of(const FlatParameter& flat) {
  return const_cast<Bucket&>(static_cast<const GradientReducer*>(this)->bucket_of(flat));
}

const GradientReducer::Bucket& GradientReducer::bucket_of(const FlatParameter& flat) const {
  for (const Bucket& bucket : buckets_) {
    if (bucket.flat == &flat) {
      return bucket;
    }
  }
  TORCH_CHECK_VALUE(false, "[zeropg] ", flat.describe(), " is frozen and has no gradient");
}

bool GradientReducer::is_complete(const FlatParameter& flat) const {
  const Bucket& bucket = bucket_of(flat);
  return bucket.arrived >= bucket.expected;
}

at::Tensor GradientReducer::gradient(FlatParameter& flat) {
  Bucket& bucket = bucket_of(flat);
  absorb(bucket);
  if (!bucket.is_kept_valid) {
    return at::Tensor();
  }
  return bucket.kept.narrow(0, flat.master_start - kept_start(bucket), flat.master_numel);
}

bool GradientReducer::has_gradient(const FlatParameter& flat, int64_t slot) const {
  return flat.slots()[slot].parameter.grad().defined();
}

void GradientReducer::zero() {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    absorb(bucket);
    for (const Slot& slot : bucket.slots) {
      const at::Tensor& parameter = bucket.flat->slots()[slot.index].parameter;
      if (slot.view.is_lost(parameter)) {
        parameter.mutable_grad().reset();
      }
    }
    if (bucket.is_kept_valid) {
      bucket.kept.zero_();
    }
    if (bucket.buffer.defined()) {
      bucket.buffer.zero_();
    }
  }
}

void GradientReducer::scale(double factor) {
  for (Bucket& bucket : buckets_) {
    if (bucket.is_kept_valid) {
      bucket.kept.mul_(factor);
    }
  }
}

at::Tensor GradientReducer::gather(const Bucket& bucket) {
  at::Tensor whole = at::empty({bucket.flat->layout().total_numel}, bucket.kept.options());
  if (communicator_.world_size() == 1) {
    whole.copy_(bucket.kept);
  } else {
    communicator_.wait(communicator_.all_gather(whole, bucket.kept));
  }
  return whole;
}

void GradientReducer::show_full() {
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    absorb(bucket);
  }
  if (!options_.stage.shards_gradients) {
    return;
  }
  is_showing_full_ = true;
  try {
    for (Bucket& bucket : buckets_) {
      if (bucket.is_kept_valid) {
        show_full(bucket);
      }
    }
  } catch (...) {  // nobody will call hide_full, and absorb would see nothing of what users do to `.grad`
    hide_full();
    throw;
  }
}

void GradientReducer::show_full(Bucket& bucket) {
  const at::Tensor whole = gather(bucket);
  for (Slot& slot : bucket.slots) {
    const ParameterSlot& parameter_slot = bucket.flat->slots()[slot.index];
    if (slot.view.is_shown(parameter_slot.parameter)) {
      slot.is_full = true;
      parameter_slot.parameter.mutable_grad() =
          whole.narrow(0, parameter_slot.offset, parameter_slot.numel).view(parameter_slot.parameter.sizes());
    }
  }
}

void GradientReducer::hide_full() {
  if (!is_showing_full_) {
    return;
  }
  at::NoGradGuard no_grad;
  is_showing_full_ = false;
  for (Bucket& bucket : buckets_) {
    for (Slot& slot : bucket.slots) {
      const at::Tensor theirs = bucket.flat->slots()[slot.index].parameter.grad();
      if (slot.is_full && theirs.defined()) {
        replace(bucket, slot, theirs);
      }
      slot.is_full = false;
    }
  }
}

bool GradientReducer::has_unreduced_gradients() {
  bool result = false;
  for (Bucket& bucket : buckets_) {
    if (bucket.buffer.defined()) {
      absorb(bucket);
      result |= bucket.buffer.defined();
    }
  }
  return result;
}

int64_t GradientReducer::gradient_bytes() const {
  int64_t bytes = 0;
  for (const Bucket& bucket : buckets_) {
    bytes += bucket.kept.defined() ? static_cast<int64_t>(bucket.kept.nbytes()) : 0;
  }
  return bytes;
}

}  // namespace zeropg

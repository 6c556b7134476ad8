#include "sharding/gradients/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace zeropg {
namespace {

// Buckets that the wire reads at once: one being reduced while the next is filled. More would only hold memory.
constexpr int64_t kMaxHeld = 2;

GradientBucket& find(const std::vector<std::unique_ptr<GradientBucket>>& buckets, const FlatParameter& flat) {
  for (const auto& bucket : buckets) {
    if (&bucket->flat() == &flat) {
      return *bucket;
    }
  }
  TORCH_CHECK_VALUE(false, "[zeropg] ", flat.describe(), " is frozen and has no gradient");
}

}  // namespace

GradientReducer::GradientReducer(Communicator& communicator, const ShardingOptions& options,
                                 const std::vector<FlatParameter*>& flats, DuringBackward during_backward)
    : context_{communicator, options,
               BufferPool(
                   [&communicator, for_slices = options.stage.shards_gradients](int64_t bytes, c10::Device device) {
                     return communicator.allocate(bytes, device, for_slices);
                   })},
      during_backward_(during_backward) {
  for (FlatParameter* flat : flats) {
    buckets_.push_back(std::make_unique<GradientBucket>(context_, *flat));
  }
}

// --- hooks ---

void GradientReducer::install(std::weak_ptr<GradientListener> listener) {
  listener_ = std::move(listener);
  notice_unfrozen();
  for (const auto& bucket : buckets_) {
    if (bucket->is_active()) bucket->agree();  // fully_shard has compared what is trainable
  }
}

void GradientReducer::notice_unfrozen() {
  for (const auto& bucket : buckets_) {
    if (bucket->flat().is_trainable()) {
      install(*bucket);
    }
  }
}

void GradientReducer::install(GradientBucket& bucket) {
  bucket.activate();
  for (GradientSlot& slot : bucket.slots()) {
    const at::Tensor& parameter = slot.place->parameter();
    if (!parameter.requires_grad() || slot.view.is_watched()) {
      continue;
    }
    if (!bucket.flat().is_own_master()) {
      parameter.set_grad_dtype(std::nullopt);  // `.grad` has the masters' dtype, and users may assign either
    }
    slot.view.watch(
        [weak = listener_, &bucket, &slot] {
          if (const auto listener = weak.lock()) {
            listener->before_gradient(bucket.flat());
            slot.view.take_away();
          }
        },
        [this, weak = listener_, &bucket, &slot] {
          if (const auto listener = weak.lock()) {
            take_gradient(bucket, slot);
            listener->after_gradient(bucket.flat());
          }
        });
  }
}

bool GradientReducer::will_accumulate() const {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {
    return true;  // backward() runs all that it reaches; grad(), and backward(inputs=...), what they name
  }
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) {
    const auto& slots = bucket->slots();
    return std::any_of(slots.begin(), slots.end(),
                       [](const GradientSlot& slot) { return slot.view.will_accumulate(); });
  });
}

// --- a backward ---

void GradientReducer::begin_backward(bool synchronize) {
  synchronize_ = synchronize;
  next_to_launch_ = 0;
  for (const auto& bucket : buckets_) {
    bucket->begin_backward();
  }
  for (const auto& bucket : buckets_) {
    absorb(*bucket);
    bucket->note_earlier_gradients();
  }
}

void GradientReducer::take_gradient(GradientBucket& bucket, GradientSlot& slot) {
  at::NoGradGuard no_grad;
  if (!bucket.may_take(slot)) {
    return;
  }
  if (!bucket.gradient().is_open()) {
    finish_some();  // gives its buffer back to the pool
  }
  bucket.take(slot, synchronize_);
  if (synchronize_ && during_backward_ != DuringBackward::kCollect) {
    launch_ready();
  }
}

void GradientReducer::launch_ready() {
  for (; next_to_launch_ < buckets_.size(); ++next_to_launch_) {
    GradientBucket& bucket = *buckets_[next_to_launch_];
    if (!bucket.may_launch()) {
      return;
    }
    bucket.launch();
  }
}

// With one copy of the model the wire has read a bucket when its average is there: nothing is let go before.
void GradientReducer::finish_some() {
  const bool has_replicas = context_.communicator.replicas() > 1;
  int64_t held =
      std::count_if(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return bucket->gradient().is_held(); });
  for (const auto& bucket : buckets_) {
    FlatGradient& gradient = bucket->gradient();
    if (gradient.is_held()) {
      const bool may_wait = during_backward_ == DuringBackward::kSendAndWait && held >= kMaxHeld;
      if (!may_wait && gradient.must_wait_to_let_go()) {
        return;
      }
      if (has_replicas) {
        gradient.let_go();
      } else {
        bucket->finish();
      }
      --held;
    }
    if (gradient.is_in_flight() && !gradient.must_wait()) {
      bucket->finish();
    }
  }
}

void GradientReducer::finish_backward() {
  at::NoGradGuard no_grad;
  if (synchronize_) {
    // Send the rest, and while it travels agree on which slots have a gradient.
    for (; next_to_launch_ < buckets_.size(); ++next_to_launch_) {
      buckets_[next_to_launch_]->launch();
    }
    context_.communicator.issue_second_hops();
    share_which_slots_have_gradients();
    for (const auto& bucket : buckets_) {
      if (bucket->is_active() && !bucket->is_agreed()) {
        bucket->agree();
        bucket->launch();
      }
    }
    for (const auto& bucket : buckets_) {
      if (!bucket->gradient().is_reduced()) {
        bucket->finish();
      }
    }
  }
  for (const auto& bucket : buckets_) {
    if (!is_showing_full_) {
      bucket->show();
    }
  }
  for (const auto& bucket : buckets_) {
    bucket->give_users_hooks_back();
  }
}

// One small all-reduce (max) of a byte per slot, and two per bucket: whether it is active, and whether it is not.
void GradientReducer::share_which_slots_have_gradients() {
  std::vector<uint8_t> told;
  for (const auto& bucket : buckets_) {
    told.push_back(bucket->is_active() ? 1 : 0);
    told.push_back(bucket->is_active() ? 0 : 1);
    for (const GradientSlot& slot : bucket->slots()) {
      told.push_back(slot.is_filled ? 1 : 0);
    }
  }
  if (context_.communicator.world_size() > 1 && !told.empty()) {
    const c10::Device device = buckets_.front()->flat().device();
    at::Tensor flags = at::empty({static_cast<int64_t>(told.size())}, at::kByte);
    std::memcpy(flags.mutable_data_ptr(), told.data(), told.size());
    flags = flags.to(device);
    context_.communicator.wait(context_.communicator.all_reduce_max(flags));
    flags = flags.cpu();
    std::memcpy(told.data(), flags.const_data_ptr(), told.size());
  }
  // What the ranks together have.
  size_t next = 0;
  for (const auto& bucket : buckets_) {
    const bool is_active_somewhere = told[next++] != 0;
    const bool is_frozen_somewhere = told[next++] != 0;
    TORCH_CHECK(!is_active_somewhere || !is_frozen_somewhere, context_.communicator.context("backward"), "'",
                bucket->slots().front().place->names.front(), "', or another parameter of unit '",
                bucket->flat().unit_name(),
                "', was unfrozen on some ranks and not on others, so the gradients of this backward are lost; expected "
                "requires_grad to be set alike on every rank. Choose what trains from numbers that all ranks have (a "
                "generator with one seed), then make model and optimizer anew and load a checkpoint.");
    for (GradientSlot& slot : bucket->slots()) {
      slot.arrived_somewhere = told[next++] != 0;
      slot.has_gradient |= slot.arrived_somewhere;
    }
  }
}

void GradientReducer::run_hooks() {
  at::NoGradGuard no_grad;
  for (const auto& bucket : buckets_) {
    for (const GradientSlot& slot : bucket->slots()) {
      if (slot.arrived_somewhere) {
        slot.view.run_hook();
      }
    }
  }
}

void GradientReducer::abandon_backward() {
  for (const auto& bucket : buckets_) {
    bucket->abandon();
  }
  for (const auto& bucket : buckets_) {
    bucket->give_users_hooks_back();
  }
  is_showing_full_ = false;
  next_to_launch_ = 0;
}

// --- between backwards ---

// While show_full() shows whole gradients, what users do to `.grad` is taken over by hide_full().
void GradientReducer::absorb(GradientBucket& bucket) {
  if (!is_showing_full_) {
    bucket.absorb();
  }
}

const GradientBucket& GradientReducer::bucket_of(const FlatParameter& flat) const { return find(buckets_, flat); }

void GradientReducer::hold_until_end(const FlatParameter& flat) { find(buckets_, flat).hold_until_end(); }

at::Tensor GradientReducer::gradient(const FlatParameter& flat) {
  GradientBucket& bucket = find(buckets_, flat);
  absorb(bucket);
  return bucket.gradient().average().of_masters();
}

void GradientReducer::zero() {
  at::NoGradGuard no_grad;
  for (const auto& bucket : buckets_) {
    absorb(*bucket);
    bucket->zero();
  }
}

void GradientReducer::scale(double factor, const std::vector<at::Tensor>* parameters) {
  for (const auto& bucket : buckets_) absorb(*bucket);
  if (parameters == nullptr) {
    for (const auto& bucket : buckets_) bucket->gradient().average().scale(factor);
    return;
  }
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const at::Tensor& parameter : *parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  for (const auto& bucket : buckets_) {
    const GradientAverage& average = bucket->gradient().average();
    if (!average.is_kept()) continue;
    for (const GradientSlot& slot : bucket->slots()) {
      if (wanted.contains(slot.place->parameter().unsafeGetTensorImpl())) average.of(*slot.place, nullptr).mul_(factor);
    }
  }
}

void GradientReducer::check_not_lost(const std::string& context) const {
  for (const auto& bucket : buckets_) {
    for (const GradientSlot& slot : bucket->slots()) {
      TORCH_CHECK(!slot.view.is_lost(), context,
                  "an earlier backward raised an error, and what backwards before it had accumulated of '",
                  slot.place->names.front(),
                  "' went with it; expected zero_grad() after the error. Call it and repeat the accumulation from its "
                  "first backward.");
    }
  }
}

void GradientReducer::show_full() {
  at::NoGradGuard no_grad;
  for (const auto& bucket : buckets_) {
    absorb(*bucket);
  }
  if (!context_.options.stage.shards_gradients) {
    return;
  }
  is_showing_full_ = true;
  try {
    for (const auto& bucket : buckets_) {
      bucket->show_full();
    }
  } catch (...) {  // nobody will call hide_full, and absorb would see nothing of what users do to `.grad`
    hide_full();
    throw;
  }
}

void GradientReducer::hide_full() {
  if (!is_showing_full_) {
    return;
  }
  at::NoGradGuard no_grad;
  is_showing_full_ = false;
  for (const auto& bucket : buckets_) {
    bucket->hide_full();
  }
}

void GradientReducer::check_can_move(const std::string& context) {
  for (const auto& bucket : buckets_) {
    absorb(*bucket);
    const FlatGradient& gradient = bucket->gradient();
    TORCH_CHECK(!gradient.is_open() && gradient.average().can_move(), context,
                "gradients wait for a step, and `.grad` shows them whole (stages 0 and 1), or they wait for their "
                "reduction (no_sync); expected none: call it after engine.step() or engine.zero_grad(), or leave "
                "gradients (lp_grads) out of what is offloaded.");
  }
}

void GradientReducer::move_gradients(const Move& move) {
  for (const auto& bucket : buckets_) {
    bucket->gradient().average().move(move);
  }
}

bool GradientReducer::has_unreduced_gradients() {
  bool result = false;
  for (const auto& bucket : buckets_) {
    if (bucket->gradient().is_open()) {
      absorb(*bucket);
      result |= bucket->gradient().is_open();
    }
  }
  return result;
}

int64_t GradientReducer::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    bytes += bucket->gradient().average().bytes();
  }
  return bytes;
}

}  // namespace zeropg

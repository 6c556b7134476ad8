#include "sharding/gradients/gradient_bucket.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace zeropg {
namespace {

at::Tensor dense(const at::Tensor& gradient) { return gradient.is_sparse() ? gradient.to_dense() : gradient; }

}  // namespace

GradientBucket::GradientBucket(BucketContext& context, FlatParameter& flat)
    : context_(context), flat_(flat), gradient_(context, flat) {
  slots_.reserve(flat.slots().size());
  for (const ParameterSlot& place : flat.slots()) {
    slots_.emplace_back(place);
  }
}

void GradientBucket::activate() { is_active_ = true; }

void GradientBucket::begin_backward() {
  gradient_.begin_backward();
  arrived_ = 0;
  expected_ = 0;
  is_held_ = false;
  for (GradientSlot& slot : slots_) {
    slot.arrived = false;
    slot.arrived_somewhere = false;
    expected_ += slot.place->parameter().requires_grad() ? 1 : 0;
  }
}

void GradientBucket::note_earlier_gradients() {
  for (GradientSlot& slot : slots_) {
    slot.had_gradient = slot.has_gradient || slot.is_filled;
  }
}

bool GradientBucket::may_take(const GradientSlot& slot) const {
  const at::Tensor& gradient = slot.view.gradient();
  if (!gradient.defined() || slot.view.is_shown()) {
    return false;
  }
  TORCH_CHECK(
      !gradient.requires_grad(), context_.communicator.context("backward(create_graph=True)"), "the gradient of '",
      slot.place->names.front(),
      "' has a graph, which its average over the ranks cannot have, so a penalty on `.grad` would be lost. Take "
      "it from torch.autograd.grad(loss, inputs, create_graph=True), which does not communicate, add the penalty "
      "to the loss, and call backward() on the sum.");
  TORCH_CHECK(!gradient_.is_launched(), "[zeropg rank ", context_.communicator.rank(), "/",
              context_.communicator.world_size(), "] parameter '", slot.place->names.front(),
              "' got a second gradient after its bucket was sent in the same backward; expected one accumulation per "
              "backward. Use torch.utils.checkpoint with use_reentrant=False.");
  return true;
}

void GradientBucket::take(GradientSlot& slot, bool synchronize) {
  if (!gradient_.is_open()) {
    open(synchronize);
  }
  at::Tensor home = gradient_.collected(*slot.place);
  const at::Tensor gradient = dense(slot.place->tensors.local_of(slot.view.gradient())).reshape({-1});
  if (slot.is_filled) {
    home.add_(gradient);
  } else {
    home.copy_(gradient);
  }
  slot.is_filled = true;
  if (!slot.arrived) {
    slot.arrived = true;
    ++arrived_;
  }
  slot.view.put_back();
}

void GradientBucket::open(bool synchronize) {
  gradient_.open(slots_, synchronize);
  for (GradientSlot& slot : slots_) {
    slot.is_filled = false;
  }
}

void GradientBucket::launch() {
  if (!is_active_ || !is_agreed_) {
    return;
  }
  if (!gradient_.is_open()) {
    open(/*synchronize=*/true);
  }
  for (const GradientSlot& slot : slots_) {
    if (!slot.is_filled) {
      gradient_.collected(*slot.place).zero_();
    }
  }
  gradient_.launch();
}

void GradientBucket::finish() {
  if (is_active_) {
    gradient_.finish();
  }
}

void GradientBucket::abandon() {
  gradient_.abandon();
  for (GradientSlot& slot : slots_) {
    slot.is_filled = false;
    slot.has_gradient = false;
    slot.view.abandon(slot.had_gradient, slot.place->names.front());
  }
}

void GradientBucket::give_users_hooks_back() {
  for (GradientSlot& slot : slots_) {
    slot.view.give_hook_back();
  }
}

void GradientBucket::show() {
  for (GradientSlot& slot : slots_) {
    if (slot.has_gradient || slot.is_filled) {
      show(slot);
    }
  }
}

void GradientBucket::show(GradientSlot& slot) {
  if (context_.options.stage.shards_gradients) {
    slot.view.show_sharded(slot.place->names.front());
  } else if (gradient_.is_open() && !gradient_.is_in_place()) {
    slot.view.show_unreduced(slot.place->names.front());
  } else {
    slot.view.show(gradient_.average().values().narrow(0, slot.place->offset, slot.place->numel));
  }
}

void GradientBucket::absorb() {
  if (!is_active_) {
    return;
  }
  at::NoGradGuard no_grad;
  // zero_grad() has dropped all of them: at once, without writing zeros to each.
  if (std::none_of(slots_.begin(), slots_.end(),
                   [](const GradientSlot& slot) { return slot.view.gradient().defined(); })) {
    for (GradientSlot& slot : slots_) {
      slot.has_gradient = false;
      slot.is_filled = false;
      slot.forget();
    }
    gradient_.drop();
    return;
  }
  // Otherwise slot by slot: dropped, lost, or replaced by a tensor of the user's.
  for (GradientSlot& slot : slots_) {
    if (!slot.view.gradient().defined()) {
      drop(slot);
      slot.forget();
    } else if (slot.view.is_lost()) {
      drop(slot);
    } else if (!slot.view.is_shown()) {
      slot.given.note(slot.place->tensors.local_of(slot.view.gradient()));
      replace(slot);
    } else {
      TORCH_CHECK(!slot.given.is_written(), "[zeropg rank ", context_.communicator.rank(), "/",
                  context_.communicator.world_size(), "] the tensor that the program put into .grad of '",
                  slot.place->names.front(),
                  "' was written to after its values were taken; .grad is another tensor since then, which the write "
                  "does not reach. Put it into .grad again after each write, or write to .grad itself (in stages 2 and "
                  "3 inside `with zeropg.full_gradients(model):`); to begin from zero call zero_grad().");
    }
  }
}

void GradientBucket::drop(GradientSlot& slot) {
  if (slot.has_gradient && gradient_.average().is_kept()) {
    gradient_.average().keep(slots_);
    gradient_.average().of(*slot.place, nullptr).zero_();
  }
  slot.has_gradient = false;
  slot.is_filled = false;
}

void GradientBucket::replace(GradientSlot& slot) {
  const at::Tensor values = dense(slot.place->tensors.local_of(slot.view.gradient()).detach()).reshape({-1});
  if (gradient_.is_open()) {  // not reduced yet: it takes the place of the sum so far
    drop(slot);
    gradient_.collected(*slot.place).copy_(values);
    slot.is_filled = true;
  } else {
    gradient_.average().keep(slots_);
    int64_t start = 0;
    const at::Tensor part = gradient_.average().of(*slot.place, &start);
    part.copy_(values.narrow(0, start, part.numel()));
    slot.has_gradient = true;
  }
  show(slot);
}

void GradientBucket::zero() {
  for (const GradientSlot& slot : slots_) {
    if (slot.view.is_lost()) {
      slot.place->parameter().mutable_grad().reset();
    }
  }
  gradient_.zero();
}

void GradientBucket::show_full() {
  if (!gradient_.average().is_kept()) {
    return;
  }
  const at::Tensor whole = gradient_.average().gather();
  for (GradientSlot& slot : slots_) {
    if (slot.view.is_shown()) {
      slot.view.show_full(whole.narrow(0, slot.place->offset, slot.place->numel));
    }
  }
}

void GradientBucket::hide_full() {
  for (GradientSlot& slot : slots_) {
    if (slot.view.is_full() && slot.view.gradient().defined()) {
      replace(slot);
    }
    slot.view.end_full();
  }
}

}  // namespace zeropg

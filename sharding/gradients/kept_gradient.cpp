#include "sharding/gradients/kept_gradient.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace zeropg {

int64_t KeptGradient::start() const { return is_sharded_ ? flat_.shard_start() : 0; }

int64_t KeptGradient::numel() const { return is_sharded_ ? flat_.layout().shard_numel : flat_.layout().total_numel; }

at::Tensor KeptGradient::of_masters() const {
  return is_valid_ ? values_.narrow(0, flat_.master.start - start(), flat_.master.numel) : at::Tensor();
}

at::Tensor KeptGradient::part(const ParameterSlot& slot, int64_t* first) const {
  const int64_t begin = start();
  const int64_t end = begin + numel();
  const int64_t from = std::clamp(slot.offset, begin, end);
  const int64_t to = std::clamp(slot.offset + slot.numel, begin, end);
  if (first != nullptr) {
    *first = std::min(from - std::min(from, slot.offset), slot.numel);
  }
  return values_.narrow(0, from - begin, to - from);
}

at::Tensor KeptGradient::gather() const {
  at::Tensor whole = at::empty({flat_.layout().total_numel}, values_.options());
  if (communicator_.world_size() == 1) {
    whole.copy_(values_);
  } else {
    communicator_.wait(communicator_.all_gather(whole, values_));
  }
  return whole;
}

void KeptGradient::scale(double factor) {
  if (is_valid_) {
    values_.mul_(factor);
  }
}

void KeptGradient::accept(const at::Tensor& reduced) {
  if (!reduced.is_alias_of(values_)) {
    if (is_valid_) {
      values_.add_(reduced);
    } else {
      values_.copy_(reduced);
    }
  }
}

void KeptGradient::allocate() {
  const auto options = at::TensorOptions().dtype(flat_.master_dtype()).device(flat_.device());
  if (is_sharded_) {
    values_ = at::zeros({numel()}, options);
  } else {  // reduced where it is
    const int64_t bytes = numel() * static_cast<int64_t>(options.dtype().itemsize());
    values_ = communicator_.allocate(bytes, flat_.device()).view(flat_.master_dtype()).zero_();
  }
  own_uses_ = values_.storage().use_count();
}

// Whether somebody else has a tensor in this memory that `.grad` does not show any more.
bool KeptGradient::has_users(const std::vector<GradientSlot>& slots) const {
  if (is_sharded_ || !values_.defined()) {
    return false;
  }
  const auto shown =
      std::count_if(slots.begin(), slots.end(), [](const GradientSlot& slot) { return slot.view.is_shown(); });
  return values_.storage().use_count() > own_uses_ + static_cast<size_t>(shown);
}

void KeptGradient::make_room(const std::vector<GradientSlot>& slots) {
  if (!values_.defined()) {
    allocate();
  }
  leave_to_users(slots, /*keeps_values=*/false);
}

void KeptGradient::leave_to_users(const std::vector<GradientSlot>& slots, bool keeps_values) {
  if (!has_users(slots)) {
    return;
  }
  const at::Tensor before = values_;
  allocate();
  if (!keeps_values) {
    return;
  }
  values_.copy_(before);
  for (const GradientSlot& slot : slots) {
    if (slot.view.is_shown()) {
      slot.view.move_to(values_.narrow(0, slot.place->offset, slot.place->numel));
    }
  }
}

}  // namespace zeropg

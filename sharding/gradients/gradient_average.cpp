#include "sharding/gradients/gradient_average.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace zeropg {

at::Tensor GradientAverage::of_masters() const {
  return is_kept_ ? values_.narrow(0, flat_.master.start - start(), flat_.master.numel) : at::Tensor();
}

at::Tensor GradientAverage::of(const ParameterSlot& slot, int64_t* first) const {
  const int64_t begin = start();
  const int64_t end = begin + numel();
  const int64_t from = std::clamp(slot.offset, begin, end);
  const int64_t to = std::clamp(slot.offset + slot.numel, begin, end);
  if (first != nullptr) {
    *first = std::min(from - std::min(from, slot.offset), slot.numel);
  }
  return values_.narrow(0, from - begin, to - from);
}

at::Tensor GradientAverage::gather() const {
  at::Tensor whole = at::empty({flat_.layout().total_numel}, values_.options());
  if (communicator_.shards() == 1) {
    whole.copy_(values_);
  } else {
    communicator_.wait(communicator_.gather_slices(whole, values_));
  }
  return whole;
}

void GradientAverage::allocate() {
  const auto options = at::TensorOptions().dtype(flat_.master_dtype()).device(flat_.device());
  if (is_sharded_) {
    values_ = at::zeros({numel()}, options);
  } else {  // reduced where it is
    const int64_t bytes = numel() * static_cast<int64_t>(options.dtype().itemsize());
    values_ = communicator_.allocate(bytes, flat_.device(), /*for_slices=*/false).view(flat_.master_dtype()).zero_();
  }
  own_uses_ = values_.storage().use_count();
}

// Whether somebody else has a tensor in this memory that `.grad` does not show any more.
bool GradientAverage::has_users(const std::vector<GradientSlot>& slots) const {
  if (is_sharded_) {
    return false;
  }
  const auto shown =
      std::count_if(slots.begin(), slots.end(), [](const GradientSlot& slot) { return slot.view.is_shown(); });
  return values_.storage().use_count() > own_uses_ + static_cast<size_t>(shown);
}

void GradientAverage::make_room(const std::vector<GradientSlot>& slots) {
  if (!values_.defined() || has_users(slots)) {
    allocate();
  }
}

void GradientAverage::take(const at::Tensor& reduced) {
  if (!reduced.is_alias_of(values_)) {
    if (is_kept_) {
      values_.add_(reduced);
    } else {
      values_.copy_(reduced);
    }
  }
  is_kept_ = true;
}

void GradientAverage::keep(const std::vector<GradientSlot>& slots) {
  if (!is_kept_) {
    make_room(slots);
    values_.zero_();
    is_kept_ = true;
  } else if (has_users(slots)) {
    const at::Tensor before = values_;
    allocate();
    values_.copy_(before);
    for (const GradientSlot& slot : slots) {
      if (slot.view.is_shown()) {
        slot.view.move_to(values_.narrow(0, slot.place->offset, slot.place->numel));
      }
    }
  }
}

void GradientAverage::zero() {
  if (is_kept_) {
    values_.zero_();
  }
}

void GradientAverage::scale(double factor) {
  if (is_kept_) {
    values_.mul_(factor);
  }
}

void GradientAverage::move(const Move& move) {
  if (is_kept_) {
    values_ = move(values_);
  } else {
    values_.reset();
  }
}

}  // namespace zeropg

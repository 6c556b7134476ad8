// The averaged gradient of one flat parameter, in the master dtype, from a backward until the optimizer's step: this
// rank's slice, or the whole where gradients are replicated.
//
// Where it is whole, `.grad` shows views of it, and users may keep them: it then moves to other memory before its
// values change.
#pragma once

#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_slot.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

class KeptGradient {
 public:
  KeptGradient(Communicator& communicator, const FlatParameter& flat, bool is_sharded)
      : communicator_(communicator), flat_(flat), is_sharded_(is_sharded) {}

  const at::Tensor& values() const { return values_; }  // [numel()]; undefined before the first make_room()
  int64_t numel() const;
  int64_t bytes() const { return values_.defined() ? static_cast<int64_t>(values_.nbytes()) : 0; }

  // Whether values() is a gradient; otherwise it is memory for the next one.
  bool is_valid() const { return is_valid_; }
  void set_valid(bool is_valid) { is_valid_ = is_valid; }

  // The range of the masters, or undefined where there is no gradient.
  at::Tensor of_masters() const;
  // What this rank keeps of one slot; `start`, if not null: which element of the flattened parameter it begins with.
  at::Tensor part(const ParameterSlot& slot, int64_t* start) const;
  at::Tensor gather() const;  // [total_numel], collective
  void scale(double factor);
  // Adds an average to what is kept, or takes its place. `reduced` may be values() itself.
  void accept(const at::Tensor& reduced);

  // Makes room for a gradient where none is kept.
  void make_room(const std::vector<GradientSlot>& slots);
  // Before values() change: what users have of them stays as it is. `keeps_values`: values() are copied along, and what
  // `.grad` shows with them.
  void leave_to_users(const std::vector<GradientSlot>& slots, bool keeps_values);

 private:
  int64_t start() const;
  void allocate();
  bool has_users(const std::vector<GradientSlot>& slots) const;

  Communicator& communicator_;
  const FlatParameter& flat_;
  const bool is_sharded_;
  at::Tensor values_;
  size_t own_uses_ = 0;  // of its storage, by this object alone
  bool is_valid_ = false;
};

}  // namespace zeropg

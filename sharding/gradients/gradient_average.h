// The average of one flat parameter's gradient, kept from the reduction until the optimizer's step.
//
// It is in the master dtype: this rank's slice, or the whole where gradients are replicated. Where it is whole, `.grad`
// shows views of it, and users may keep them: it then moves to other memory before its values change.
#pragma once

#include <cstdint>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_slot.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

// `slots`: those of the flat parameter.
class GradientAverage {
 public:
  // `is_sharded`: this rank keeps its slice alone.
  GradientAverage(Communicator& communicator, const FlatParameter& flat, bool is_sharded)
      : communicator_(communicator), flat_(flat), is_sharded_(is_sharded) {}

  // Whether an average is kept; otherwise values() is memory for the next one, undefined before the first.
  bool is_kept() const { return is_kept_; }
  const at::Tensor& values() const { return values_; }  // [numel()]
  bool is_sharded() const { return is_sharded_; }
  // The range of the flat parameter that it covers.
  int64_t start() const { return is_sharded_ ? flat_.shard_start() : 0; }
  int64_t numel() const { return is_sharded_ ? flat_.layout().shard_numel : flat_.layout().total_numel; }

  // The range of the masters, or undefined where there is no average.
  at::Tensor of_masters() const;
  // What this rank keeps of one slot; `start`, if not null: which element of the flattened parameter it begins with.
  at::Tensor of(const ParameterSlot& slot, int64_t* start) const;
  at::Tensor gather() const;  // the whole average, [total_numel]; collective

  // Makes memory for an average, where none is kept.
  void make_room(const std::vector<GradientSlot>& slots);
  // What a reduction has given, [numel()], which may lie in values() already: it is added to what is kept, or kept.
  void take(const at::Tensor& reduced);
  // Before the average is written: it is zero where none was kept, and what users have of it stays as it is.
  void keep(const std::vector<GradientSlot>& slots);
  void drop() { is_kept_ = false; }
  void zero();
  void scale(double factor);

  // Whether `.grad` shows no views of what is kept, which may then be moved.
  bool can_move() const { return is_sharded_ || !is_kept_; }
  void move(const Move& move);  // what is kept, to other memory; memory for the next is freed
  int64_t bytes() const { return values_.defined() ? static_cast<int64_t>(values_.nbytes()) : 0; }

 private:
  void allocate();
  bool has_users(const std::vector<GradientSlot>& slots) const;

  Communicator& communicator_;
  const FlatParameter& flat_;
  const bool is_sharded_;
  at::Tensor values_;
  size_t own_uses_ = 0;  // of its storage, by this object alone
  bool is_kept_ = false;
};

}  // namespace zeropg

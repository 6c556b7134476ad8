// The gradients of one flat parameter on their way from autograd to the optimizer: taken from `.grad` into a buffer,
// reduced over the ranks, kept as an average, and shown in `.grad` again.
#pragma once

#include <vector>

#include "sharding/gradients/flat_gradient.h"
#include "sharding/gradients/gradient_slot.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

class GradientBucket {
 public:
  GradientBucket(BucketContext& context, FlatParameter& flat);
  GradientBucket(const GradientBucket&) = delete;  // hooks refer to slots

  FlatParameter& flat() const { return flat_; }
  std::vector<GradientSlot>& slots() { return slots_; }
  const std::vector<GradientSlot>& slots() const { return slots_; }
  FlatGradient& gradient() { return gradient_; }
  const FlatGradient& gradient() const { return gradient_; }

  // The flat parameter has become trainable. Until then the bucket takes part in nothing.
  void activate();
  bool is_active() const { return is_active_; }
  // All ranks have said that it is active. Until then it is not sent: a rank where it is still frozen sends nothing,
  // and what it sends next would meet this bucket.
  void agree() { is_agreed_ = true; }
  bool is_agreed() const { return is_agreed_; }

  // --- a backward, in this order ---
  void begin_backward();
  void note_earlier_gradients();  // what absorb() has left
  // The bucket is sent at the end of this backward: it may get more than one gradient of a slot.
  void hold_until_end() { is_held_ = true; }
  // Whether autograd has put a local gradient into `.grad` of the slot. RuntimeError for one that cannot be taken.
  bool may_take(const GradientSlot& slot) const;
  // Moves that gradient to the flat one, which is opened for it; `synchronize`: this backward reduces it.
  void take(GradientSlot& slot, bool synchronize);
  // Whether every slot has got its gradient in this backward on this rank.
  bool is_complete() const { return arrived_ >= expected_; }
  bool may_launch() const { return !is_active_ || !is_agreed_ || (!is_held_ && is_complete()); }
  // Begins the reduction over the ranks, with zeros for what is missing. Collective; nothing before agree().
  void launch();
  void finish();  // waits for it and keeps the average
  // After a backward that raised, instead of finish(): drops all gradients; where there were some before it, `.grad`
  // says that they are lost. Throws as FlatGradient::abandon, before anything is dropped.
  void abandon();

  void give_users_hooks_back();

  // --- between backwards ---
  void show();    // `.grad` becomes what stands for the gradient
  void absorb();  // takes over what the user has done to `.grad`
  void zero();
  void show_full();  // collective
  void hide_full();

 private:
  void open(bool synchronize);
  void show(GradientSlot& slot);
  void drop(GradientSlot& slot);
  void replace(GradientSlot& slot);

  BucketContext& context_;
  FlatParameter& flat_;
  std::vector<GradientSlot> slots_;
  FlatGradient gradient_;
  bool is_active_ = false;
  bool is_agreed_ = false;
  int64_t expected_ = 0;  // slots that may get a gradient in this backward
  int64_t arrived_ = 0;
  bool is_held_ = false;
};

}  // namespace zeropg

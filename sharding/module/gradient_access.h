// The gradients of a whole model between backwards: for the optimizer, for clipping, and for users who want them whole.
#pragma once

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/module/backward.h"
#include "sharding/units/units.h"

namespace zeropg {

// Every call first cleans up after a backward that raised.
class GradientAccess {
 public:
  GradientAccess(Communicator& communicator, const Units& units, Backward& backward, GradientReducer& reducer)
      : communicator_(communicator), units_(units), backward_(backward), reducer_(reducer) {}

  // The average, of the flat's masters, or undefined. RuntimeError where gradients are not reduced, or lost.
  at::Tensor of(int64_t flat);
  // Whether the optimizer should update this slot: some rank produced a gradient and the user did not drop it.
  bool has(int64_t flat, int64_t slot) const;
  int64_t digest() const;  // of which parameters have one; 0 where each rank keeps its own
  bool will_accumulate() const { return reducer_.will_accumulate(); }  // the autograd task that runs
  void zero();
  void scale(double factor, const std::vector<at::Tensor>* parameters = nullptr);  // in place; null: of all
  void show_full();  // collective; until hide_full every `.grad` is whole
  void hide_full();
  // The norm before clipping. Collective.
  double clip_norm(double max_norm, double norm_type, bool error_if_nonfinite);

 private:
  // RuntimeError where not every gradient is there and reduced.
  void check_reduced(const char* operation, const char* before_what);

  Communicator& communicator_;
  const Units& units_;
  Backward& backward_;
  GradientReducer& reducer_;
};

}  // namespace zeropg

// One parameter's place in a gradient bucket.
#pragma once

#include "sharding/gradients/given_gradient.h"
#include "sharding/gradients/grad_view.h"
#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

struct GradientSlot {
  explicit GradientSlot(const ParameterSlot& slot) : place(&slot), view(slot.tensors) {}

  // What was shown, and given, counts as any other tensor of the user's from now on.
  void forget() {
    view.forget();
    given.forget();
  }

  const ParameterSlot* place;  // in the flat parameter
  GradView view;
  GivenGradient given;
  bool had_gradient = false;       // when this backward began
  bool arrived = false;            // in this backward
  bool arrived_somewhere = false;  // on some rank, in this backward
  bool is_filled = false;          // the open bucket holds a gradient of this slot
  bool has_gradient = false;       // some rank contributed since the gradient was last dropped
};

}  // namespace zeropg

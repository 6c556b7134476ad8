// What a GradientReducer tells the backward that it works for.
#pragma once

#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

// Called by the thread that runs the backward, once per gradient of a parameter of `flat`.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  virtual void before_gradient(FlatParameter& flat) = 0;  // autograd is about to accumulate it
  virtual void after_gradient(FlatParameter& flat) = 0;   // it is in its bucket
};

}  // namespace zeropg

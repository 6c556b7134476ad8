// Masters: the values of highest precision, which the optimizer updates and checkpoints save.
#pragma once

#include "sharding/parameters/flat_parameter.h"

namespace zeropg {

// Sets the masters of `flat` for flat range [start, start + home.numel()): `home` itself (the same range in the
// parameters' dtype) where that is the master's dtype, otherwise a copy from `values` [total_numel] beside it, in the
// tier where reserve_master() has made room. Fills `home`.
void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start);

}  // namespace zeropg

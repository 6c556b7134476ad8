// Masters: the values of highest precision, which the optimizer updates and checkpoints save.
#pragma once

#include "sharding/flat_parameter.h"

namespace zeropg {

// Sets `flat.master` for flat range [start, start + home.numel()): `home` itself (the same range in the parameters'
// dtype) where that is the master's dtype, otherwise a copy from `values` [total_numel] beside it. Fills `home`.
void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start);

}  // namespace zeropg

#include "sharding/parameters/master.h"

#include <c10/util/Exception.h>

namespace zeropg {

void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start) {
  const at::Tensor range = values.narrow(0, start, home.numel());
  home.copy_(range);
  flat.master_start = start;
  flat.master_numel = home.numel();
  if (flat.is_own_master()) {
    flat.master = home;
    flat.parameter_out = at::Tensor();
  } else if (flat.tiered_master != nullptr) {
    TORCH_INTERNAL_ASSERT(flat.tiered_master->numel() == flat.master_numel);
    flat.tiered_master->write(0, range);
    flat.master = flat.tiered_master->in_place();
    flat.parameter_out = home;
  } else {
    flat.master = range.to(flat.master_dtype(), /*non_blocking=*/false, /*copy=*/true);
    flat.parameter_out = home;
  }
}

}  // namespace zeropg

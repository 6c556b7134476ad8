#include "sharding/master.h"

namespace zeropg {

void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start) {
  const at::Tensor range = values.narrow(0, start, home.numel());
  home.copy_(range);
  flat.master_start = start;
  if (flat.is_own_master()) {
    flat.master = home;
    flat.parameter_out = at::Tensor();
  } else {
    flat.master = range.to(flat.master_dtype(), /*non_blocking=*/false, /*copy=*/true);
    flat.parameter_out = home;
  }
}

}  // namespace zeropg

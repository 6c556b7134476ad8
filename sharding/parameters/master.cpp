#include "sharding/parameters/master.h"

#include <c10/util/Exception.h>

namespace zeropg {

void reserve_master(FlatParameter& flat, const ShardingOptions& options) {
  if (options.optimizer_offload == nullptr || flat.is_own_master()) return;
  const FlatLayout& layout = flat.layout();
  const int64_t numel = options.stage.shards_optimizer ? layout.shard_numel : layout.total_numel;
  flat.tiered_master = std::make_shared<TieredVector>(options.optimizer_offload, "masters of " + flat.describe(), numel,
                                                      flat.master_dtype());
}

void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start) {
  const at::Tensor range = values.narrow(0, start, home.numel());
  home.copy_(range);
  flat.master_start = start;
  flat.master_numel = home.numel();
  flat.parameter_out = flat.is_own_master() || flat.sends_differences() ? at::Tensor() : home;
  if (flat.is_own_master()) {
    flat.master = home;
  } else if (flat.tiered_master != nullptr) {
    TORCH_INTERNAL_ASSERT(flat.tiered_master->numel() == flat.master_numel);
    flat.tiered_master->write(0, range);
    flat.master = flat.tiered_master->in_place();
  } else {
    flat.master = range.to(flat.master_dtype(), /*non_blocking=*/false, /*copy=*/true);
  }
}

void for_each_master_piece(const FlatParameter& flat, int64_t start, int64_t stop,
                           const std::function<void(int64_t, const at::Tensor&)>& take) {
  if (!flat.master.defined()) {
    flat.tiered_master->read(start, stop, take);
  } else if (start < stop) {
    take(start, flat.master.narrow(0, start, stop - start));
  }
}

int64_t resident_master_bytes(const FlatParameter& flat) {
  return flat.is_own_master() || flat.tiered_master != nullptr ? 0 : static_cast<int64_t>(flat.master.nbytes());
}

}  // namespace zeropg

#include "sharding/parameters/master.h"

#include <c10/util/Exception.h>

namespace zeropg {

void reserve_master(FlatParameter& flat, const ShardingOptions& options) {
  if (options.optimizer_offload == nullptr || flat.is_own_master()) return;
  const FlatLayout& layout = flat.layout();
  const int64_t numel = options.stage.shards_optimizer ? layout.shard_numel : layout.total_numel;
  flat.master.tiered = std::make_shared<TieredVector>(options.optimizer_offload, "masters of " + flat.describe(), numel,
                                                      flat.master_dtype());
}

void move_home(FlatParameter& flat, const at::Tensor& home) {
  flat.parameter_out = flat.is_own_master() || flat.sends_differences() ? at::Tensor() : home;
  if (flat.is_own_master()) {
    flat.master.values = home;
  }
}

void make_master(FlatParameter& flat, at::Tensor home, const at::Tensor& values, int64_t start) {
  const at::Tensor range = values.narrow(0, start, home.numel());
  home.copy_(range);
  flat.master.start = start;
  flat.master.numel = home.numel();
  move_home(flat, home);
  if (flat.is_own_master()) {
    return;
  }
  if (flat.master.tiered != nullptr) {
    TORCH_INTERNAL_ASSERT(flat.master.tiered->numel() == flat.master.numel);
    flat.master.tiered->write(0, range);
    flat.master.values = flat.master.tiered->in_place();
  } else {
    flat.master.values = range.to(flat.master_dtype(), /*non_blocking=*/false, /*copy=*/true);
  }
}

void for_each_master_piece(const FlatParameter& flat, int64_t start, int64_t stop,
                           const std::function<void(int64_t, const at::Tensor&)>& take) {
  if (!flat.master.values.defined()) {
    flat.master.tiered->read(start, stop, take);
  } else if (start < stop) {
    take(start, flat.master.values.narrow(0, start, stop - start));
  }
}

int64_t resident_master_bytes(const FlatParameter& flat) {
  return flat.is_own_master() || flat.master.tiered != nullptr ? 0 : static_cast<int64_t>(flat.master.values.nbytes());
}

}  // namespace zeropg

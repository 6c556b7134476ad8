#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "sharding/fetch/arriving_weights.h"
#include "sharding/fetch/registry.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

// Stages 0 to 2: parameters are whole on every rank all the time, but for those that an overlapped step has left on
// their way.
class ReplicatedFetch final : public Fetch {
 public:
  ReplicatedFetch(Communicator& communicator, const ShardingOptions& options)
      : communicator_(communicator),
        updates_slices_(options.stage.shards_optimizer),
        arriving_(communicator, options.weights) {}

  const char* name() const override { return "replicated"; }
  bool is_collective() const override { return false; }

  void adopt(FlatParameter& flat, const at::Tensor& values) override {
    device_ = flat.device();
    const int64_t total = flat.layout().total_numel;
    at::Tensor whole = at::empty({total}, values.options().dtype(flat.dtype()));
    whole.copy_(values);
    // Frozen parameters are never updated; only a master beside them is worth cutting.
    const bool slice = updates_slices_ && (flat.is_trainable() || !flat.is_own_master());
    const int64_t start = slice ? flat.shard_start() : 0;
    make_master(flat, whole.narrow(0, start, slice ? flat.layout().shard_numel : total), values, start);
    flat.attach(whole);
    memory_.parameters += static_cast<int64_t>(whole.nbytes());
  }

  void unshard(FlatParameter& flat, Use) override { arriving_.wait_for(flat); }
  void reshard(FlatParameter&) override {}
  bool begin_update(int64_t news) override { return communicator_.is_same_on_shards(news, device_); }

  void end_update(const std::vector<FlatParameter*>& flats, Change change) override {
    if (!updates_slices_ || communicator_.shards() == 1) {
      return;
    }
    std::vector<FlatParameter*> changed;  // a load changes frozen parameters, too
    std::copy_if(flats.begin(), flats.end(), std::back_inserter(changed),
                 [&](const FlatParameter* flat) { return change == Change::kLoad || flat->is_trainable(); });
    if (change == Change::kOverlappedStep) {
      arriving_.send(changed);
    } else {
      arriving_.gather(changed, /*as_differences=*/change == Change::kStep);
    }
  }

  Memory memory() const override { return {memory_.parameters, arriving_.buffer_bytes()}; }

  void offload(FlatParameter& flat, const Move& move) override {
    const at::Tensor whole = move(flat.whole());
    flat.detach();
    move_home(flat, whole.narrow(0, flat.master.start, flat.master.numel));
    away_.emplace(&flat, whole);
  }
  void reload(FlatParameter& flat, const Move& move) override {
    const at::Tensor whole = move(away_.extract(&flat).mapped());
    move_home(flat, whole.narrow(0, flat.master.start, flat.master.numel));
    flat.attach(whole);
  }

 private:
  Communicator& communicator_;
  bool updates_slices_;
  ArrivingWeights arriving_;
  std::unordered_map<const FlatParameter*, at::Tensor> away_;  // whole, in other memory
  c10::Device device_ = c10::kCPU;
  Memory memory_;
};

}  // namespace

std::unique_ptr<Fetch> make_replicated_fetch(Communicator& communicator, const ShardingOptions& options,
                                             const std::vector<FlatParameter*>& /*flats*/) {
  if (options.stage.shards_parameters) {
    return nullptr;
  }
  return std::make_unique<ReplicatedFetch>(communicator, options);
}

}  // namespace zeropg

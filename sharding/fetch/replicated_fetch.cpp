#include <ATen/ops/empty.h>

#include "sharding/fetch/registry.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

// Stages 0 to 2: parameters are whole on every rank all the time.
class ReplicatedFetch final : public Fetch {
 public:
  ReplicatedFetch(Communicator& communicator, const ShardingOptions& options)
      : communicator_(communicator), updates_slices_(options.stage.shards_optimizer) {}

  const char* name() const override { return "replicated"; }
  bool is_collective() const override { return false; }

  void adopt(const std::vector<FlatParameter*>& flats) override {
    for (FlatParameter* flat : flats) {
      device_ = flat->device();
      const at::Tensor values = flat->take_initial_values();
      const int64_t total = flat->layout().total_numel;
      at::Tensor whole = at::empty({total}, values.options().dtype(flat->dtype()));
      whole.copy_(values);
      // Frozen parameters are never updated; only a master beside them is worth cutting.
      const bool slice = updates_slices_ && (flat->is_trainable() || !flat->is_own_master());
      const int64_t start = slice ? flat->shard_start() : 0;
      make_master(*flat, whole.narrow(0, start, slice ? flat->layout().shard_numel : total), values, start);
      flat->attach(whole);
      memory_.parameters += static_cast<int64_t>(whole.nbytes());
    }
  }

  void unshard(FlatParameter&, bool) override {}
  void reshard(FlatParameter&) override {}
  bool begin_update(int64_t news) override { return communicator_.is_same_everywhere(news, device_); }

  void end_update(const std::vector<FlatParameter*>& flats) override {
    if (!updates_slices_ || communicator_.world_size() == 1) {
      return;
    }
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (FlatParameter* flat : flats) {
      if (flat->is_trainable()) {
        const at::Tensor& whole = flat->whole();
        works.push_back(
            communicator_.all_gather(whole, whole.narrow(0, flat->shard_start(), flat->layout().shard_numel)));
      }
    }
    for (const auto& work : works) {
      communicator_.wait(work);
    }
  }

  Memory memory() const override { return memory_; }

 private:
  Communicator& communicator_;
  bool updates_slices_;
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

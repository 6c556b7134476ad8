#include <ATen/ops/empty.h>

#include <unordered_map>

#include "sharding/fetch/registry.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

// Stage 3 on any process group: a unit is made whole by an all-gather, so every rank must run its units in the same
// order.
class GatheredFetch final : public Fetch {
 public:
  GatheredFetch(Communicator& communicator, const ShardingOptions& options)
      : communicator_(communicator), weights_codec_(options.weights_codec) {}

  const char* name() const override { return "gathered"; }
  bool is_collective() const override { return communicator_.world_size() > 1; }

  void adopt(const std::vector<FlatParameter*>& flats) override {
    for (FlatParameter* flat : flats) {
      device_ = flat->device();
      const at::Tensor values = flat->take_initial_values();
      at::Tensor shard = at::empty({flat->layout().shard_numel}, values.options().dtype(flat->dtype()));
      make_master(*flat, shard, values, flat->shard_start());
      memory_.parameters += static_cast<int64_t>(shard.nbytes());
      shards_[flat] = shard;
    }
  }

  void unshard(FlatParameter& flat, Use use) override {
    at::Tensor whole = pool_.acquire(flat.layout().total_numel, flat.dtype(), flat.device());
    if (travels_encoded(flat, use)) {
      flat.clear_padding(shards_.at(&flat));
    }
    if (communicator_.world_size() == 1) {
      whole.copy_(shards_.at(&flat));
    } else {
      try {
        gather(flat, whole, use);
      } catch (...) {  // where a signal handler ended the waiting the gather goes on
        pool_.forget(whole);
        throw;
      }
    }
    flat.attach(whole);
  }

  void reshard(FlatParameter& flat) override {
    at::Tensor whole = flat.whole();
    flat.detach();
    pool_.release(std::move(whole));
  }

  bool begin_update(int64_t news) override { return communicator_.is_same_everywhere(news, device_); }
  void end_update(const std::vector<FlatParameter*>&, bool /*is_step*/) override {}
  Memory memory() const override { return {memory_.parameters, pool_.allocated_bytes()}; }

 private:
  // Only what units compute with: what programs read, write and save is exact.
  bool travels_encoded(const FlatParameter& flat, Use use) const {
    return use == Use::kCompute && flat.is_encoded() && weights_codec_ != nullptr;
  }

  void gather(const FlatParameter& flat, const at::Tensor& whole, Use use) {
    const at::Tensor& shard = shards_.at(&flat);
    try {
      communicator_.wait(travels_encoded(flat, use) ? communicator_.all_gather_encoded(whole, shard, weights_codec_)
                                                    : communicator_.all_gather(whole, shard));
    } catch (const c10::Error& error) {
      C10_THROW_ERROR(DistBackendError, c10::str("[zeropg rank ", communicator_.rank(), "/", communicator_.world_size(),
                                                 "] unshard of ", flat.describe(),
                                                 " failed; expected all ranks to run the same units in the same order "
                                                 "(only where ranks share a node on zeropg may paths differ): ",
                                                 error.what_without_backtrace()));
    }
  }

  Communicator& communicator_;
  std::shared_ptr<const Compressor> weights_codec_;
  BufferPool pool_;
  std::unordered_map<const FlatParameter*, at::Tensor> shards_;
  c10::Device device_ = c10::kCPU;
  Memory memory_;
};

}  // namespace

std::unique_ptr<Fetch> make_gathered_fetch(Communicator& communicator, const ShardingOptions& options,
                                           const std::vector<FlatParameter*>& /*flats*/) {
  if (!options.stage.shards_parameters) {
    return nullptr;
  }
  return std::make_unique<GatheredFetch>(communicator, options);
}

}  // namespace zeropg

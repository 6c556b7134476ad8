#include <ATen/ops/empty.h>
#include <ATen/ops/sub.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <unordered_map>
#include <utility>

#include "sharding/fetch/registry.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

// Differences on the wire at once: one is added while the next travels.
constexpr size_t kMaxInFlight = 2;

// Stages 0 to 2: parameters are whole on every rank all the time.
class ReplicatedFetch final : public Fetch {
 public:
  ReplicatedFetch(Communicator& communicator, const ShardingOptions& options)
      : communicator_(communicator),
        updates_slices_(options.stage.shards_optimizer),
        weights_codec_(options.weights_codec) {}

  const char* name() const override { return "replicated"; }
  bool is_collective() const override { return false; }

  void adopt(FlatParameter& flat) override {
    device_ = flat.device();
    const at::Tensor values = flat.take_initial_values();
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

  void unshard(FlatParameter&, Use) override {}
  void reshard(FlatParameter&) override {}
  bool begin_update(int64_t news) override { return communicator_.is_same_on_shards(news, device_); }

  void end_update(const std::vector<FlatParameter*>& flats, bool is_step) override {
    if (!updates_slices_ || communicator_.shards() == 1) {
      return;
    }
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<FlatParameter*> different;
    for (FlatParameter* flat : flats) {
      if (is_step && !flat->is_trainable()) {
        continue;  // but a load changes frozen parameters, too
      }
      if (flat->sends_differences() && is_step) {
        different.push_back(flat);
        continue;
      }
      const at::Tensor own = own_slice(*flat);
      if (flat->sends_differences()) {
        own.copy_(flat->master.values);
      }
      works.push_back(communicator_.gather_slices(flat->whole(), own));
    }
    send_differences(std::move(different));
    for (const auto& work : works) {
      communicator_.wait(work);
    }
  }

  Memory memory() const override { return {memory_.parameters, pool_.allocated_bytes()}; }

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
  struct Difference {
    FlatParameter* flat = nullptr;
    at::Tensor mine;        // [shard_numel]
    at::Tensor everybodys;  // [total_numel], decoded
    c10::intrusive_ptr<c10d::Work> work;
  };

  static at::Tensor own_slice(const FlatParameter& flat) {
    return flat.whole().narrow(0, flat.shard_start(), flat.layout().shard_numel);
  }

  // Note [Weights as differences]
  // Every rank has the same replica r of the masters w, whose slices are on their owners. A step sends an encoding of
  // w - r, and every rank, the owner too, adds what it decodes to: so replicas stay equal to the bit, and what one
  // encoding loses is in the next difference. That is error feedback without residuals (EF21, Richtarik et al.), and it
  // survives a checkpoint, whose masters every load sends as they are.
  void send_differences(std::vector<FlatParameter*> flats) {
    // The largest first: the others then fit into their buffers.
    std::stable_sort(flats.begin(), flats.end(), [](const FlatParameter* a, const FlatParameter* b) {
      return a->layout().total_numel > b->layout().total_numel;
    });
    std::exception_ptr interrupt;
    std::deque<Difference> in_flight;
    const auto add_first = [&] {
      add(in_flight.front(), interrupt);
      in_flight.pop_front();
    };
    for (FlatParameter* flat : flats) {
      if (in_flight.size() == kMaxInFlight) {
        add_first();
      }
      in_flight.push_back(send_difference(*flat));
    }
    while (!in_flight.empty()) {
      add_first();
    }
    if (interrupt != nullptr) {
      std::rethrow_exception(interrupt);
    }
  }

  Difference send_difference(FlatParameter& flat) {
    const at::Tensor& replica = flat.whole();
    replica.nan_to_num_(0, 0, 0);  // nothing added to a NaN would mend it when the master has been mended
    at::Tensor mine = pool_.acquire(flat.layout().shard_numel, at::kFloat, flat.device());
    at::sub_out(mine, flat.master.values, own_slice(flat));
    flat.clear_padding(mine);
    at::Tensor everybodys = pool_.acquire(flat.layout().total_numel, at::kFloat, flat.device());
    return {&flat, mine, everybodys, communicator_.gather_slices_encoded(everybodys, mine, weights_codec_)};
  }

  // A replica that misses a difference stays different from those of other ranks. So what a signal handler raises while
  // this rank waits is kept for the end.
  void add(Difference& difference, std::exception_ptr& interrupt) {
    for (bool has_arrived = false; !has_arrived;) {
      try {
        communicator_.wait(difference.work);
        has_arrived = true;
      } catch (const c10::Error&) {
        throw;  // the group has failed
      } catch (...) {
        interrupt = std::current_exception();
      }
    }
    difference.flat->whole().add_(difference.everybodys);
    pool_.release(std::move(difference.mine));
    pool_.release(std::move(difference.everybodys));
  }

  Communicator& communicator_;
  bool updates_slices_;
  std::shared_ptr<const Compressor> weights_codec_;
  BufferPool pool_;
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

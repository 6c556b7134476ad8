#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <unordered_map>

#include "sharding/fetch/gathered_buffers.h"
#include "sharding/fetch/registry.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

constexpr int64_t kMostFlats = 1'000'000;  // of a model

// The same on every rank, and another one for each model: rank 0's count. Collective.
int64_t number_of_model(Communicator& communicator, c10::Device device) {
  static std::atomic<int64_t> made{0};
  const int64_t own = ++made;
  if (communicator.world_size() == 1) return own;
  return communicator.gather_values({own}, device)[0][0].item<int64_t>();
}

// Which flat parameters this rank trains, in words that ranks compare: those that train others gather others in a
// backward, and the next collective may be one that does not end.
class TrainedFlats {
 public:
  struct Difference {
    const FlatParameter* flat = nullptr;  // null: there is none
    int64_t with = 0;                     // a rank that trains it, and one that does not
    int64_t without = 0;
  };

  void add(const FlatParameter& flat) {
    flats_.push_back(&flat);
    words_.resize(1 + (flats_.size() + kBits - 1) / kBits);
  }
  // `trains`: false where no backward follows, which is in the first word.
  void note(bool trains) {
    std::fill(words_.begin(), words_.end(), 0);
    words_.front() = trains ? 1 : 0;
    for (size_t i = 0; trains && i < flats_.size(); ++i) {
      const auto& slots = flats_[i]->slots();
      const auto is_trained = [](const ParameterSlot& slot) { return slot.parameter().requires_grad(); };
      if (std::any_of(slots.begin(), slots.end(), is_trained)) {
        words_[1 + i / kBits] |= static_cast<int64_t>(uint64_t{1} << (i % kBits));
      }
    }
  }
  // `trains`: false gives the words of a rank that does not.
  at::Tensor words(bool trains) const {
    const at::Tensor words = at::tensor(words_, at::kLong);
    return trains ? words : at::zeros_like(words);
  }
  // `told`: [ranks, words]. Between those that train.
  Difference find_difference(const at::Tensor& told) const {
    const auto rows = told.accessor<int64_t, 2>();
    int64_t first = 0;
    while (first < told.size(0) && rows[first][0] == 0) ++first;
    for (int64_t rank = first + 1; rank < told.size(0); ++rank) {
      for (size_t i = 0; rows[rank][0] != 0 && i < flats_.size(); ++i) {
        const int64_t word = static_cast<int64_t>(1 + i / kBits);
        const auto differing = static_cast<uint64_t>(rows[rank][word] ^ rows[first][word]) >> (i % kBits);
        if ((differing & 1U) == 0) continue;
        const bool has_first = (static_cast<uint64_t>(rows[first][word]) >> (i % kBits) & 1U) != 0;
        return {flats_[i], has_first ? first : rank, has_first ? rank : first};
      }
    }
    return {};
  }

 private:
  static constexpr size_t kBits = 64;  // of a word

  std::vector<const FlatParameter*> flats_;  // in the order in which they came, the same on every rank
  std::vector<int64_t> words_;
};

// Stage 3 on any process group: a unit is made whole by an all-gather, so every rank must run its units in the same
// order. What units compute with the ranks of a node have together where they can (gathered_buffers.h).
class GatheredFetch final : public Fetch {
 public:
  GatheredFetch(Communicator& communicator, const ShardingOptions& options, c10::Device device)
      : communicator_(communicator),
        weights_(options.weights),
        buffers_(communicator, device.is_cpu()),
        first_item_(kMostFlats * number_of_model(communicator, device)) {}

  const char* name() const override { return buffers_.shares_in_node() ? "gathered per node" : "gathered"; }
  bool is_collective() const override { return communicator_.shards() > 1; }
  int64_t first_item() const override { return first_item_; }

  void adopt(FlatParameter& flat, const at::Tensor& values) override {
    device_ = flat.device();
    at::Tensor shard = at::empty({flat.layout().shard_numel}, values.options().dtype(flat.dtype()));
    make_master(flat, shard, values, flat.shard_start());
    memory_.parameters += static_cast<int64_t>(shard.nbytes());
    const int64_t item = first_item_ + static_cast<int64_t>(homes_.size()) + 1;
    homes_.emplace(&flat, Home{shard, item, at::empty({1}, at::kLong).fill_(item).to(device_)});
    trained_.add(flat);
  }

  void note_trained(bool trains) override { trained_.note(trains); }

  void prefetch(FlatParameter& flat) override { prefetched_.emplace(&flat, begin(flat, Use::kCompute)); }

  void unshard(FlatParameter& flat, Use use) override {
    const auto oldest = prefetched_.lower_bound(&flat);
    const bool is_prefetched = use == Use::kCompute && oldest != prefetched_.end() && oldest->first == &flat;
    const Gather gather = is_prefetched ? prefetched_.extract(oldest).mapped() : begin(flat, use);
    at::Tensor whole = finish(flat, gather);
    const TrainedFlats::Difference difference = std::exchange(difference_, {});
    if (difference.flat != nullptr) {
      buffers_.release(std::move(whole));
      TORCH_CHECK(false, communicator_.context("unshard"), "'", difference.flat->slots().front().names.front(),
                  "', or another parameter of unit '", difference.flat->unit_name(), "', requires a gradient on ",
                  rank_of(difference.with), ", and none of them does on ", rank_of(difference.without),
                  "; expected requires_grad to be set alike on every rank. Choose what trains from numbers that all "
                  "ranks have (a generator with one seed), then make model and optimizer anew and load a checkpoint.");
    }
    flat.attach(whole);
  }

  void drop_prefetched(bool waits) override {
    while (!prefetched_.empty()) {
      const auto node = prefetched_.extract(prefetched_.begin());
      const Gather& gather = node.mapped();
      if (!waits || is_broken_) {
        buffers_.forget(gather.buffer);
      } else {
        buffers_.release(finish(*node.key(), gather));
      }
    }
    if (waits) {
      compare_items();
    }
    difference_ = {};  // of a pass that is over
  }

  void reshard(FlatParameter& flat) override {
    at::Tensor whole = flat.whole();
    flat.detach();
    buffers_.release(std::move(whole));
  }

  bool begin_update(int64_t news) override {
    drop_prefetched(/*waits=*/true);
    check_not_broken();
    return communicator_.is_same_on_shards(news, device_);
  }
  void end_update(const std::vector<FlatParameter*>&, Change /*change*/) override {}
  Memory memory() const override { return {memory_.parameters, buffers_.allocated_bytes()}; }

  void offload(FlatParameter& flat, const Move& move) override {
    buffers_.clear();
    reload(flat, move);
  }
  void reload(FlatParameter& flat, const Move& move) override {
    at::Tensor& shard = homes_.at(&flat).shard;
    shard = move(shard);
    move_home(flat, shard.narrow(0, flat.master.start - flat.shard_start(), flat.master.numel));
  }

 private:
  // Only what units compute with: what programs read, write and save is exact.
  bool travels_encoded(const FlatParameter& flat, Use use) const {
    return use == Use::kCompute && flat.is_encoded() && weights_.codec != nullptr;
  }

  // A program that writes has memory of its own. What travels encoded is decoded to fp32, which is rounded to other
  // dtypes by each rank.
  bool may_share(const FlatParameter& flat, Use use) const {
    return use != Use::kWrite && communicator_.shards() > 1 &&
           (!travels_encoded(flat, use) || flat.dtype() == at::kFloat);
  }

  struct Home {
    at::Tensor shard;
    int64_t item;            // its number: ranks that gather different ones of the same size are found out
    at::Tensor item_tensor;  // [1], on the device
  };

  struct Gather {
    int64_t began = 0;  // for the log
    GatheredBuffers::Buffer buffer;
    c10::intrusive_ptr<c10d::Work> work;  // null where there is nobody to gather from
    at::Tensor item;                      // its number, and what this rank trains
    at::Tensor items;                     // [shards, ...]: of all; undefined: the group compares numbers
    c10::intrusive_ptr<c10d::Work> telling;
  };

  struct Told {
    const FlatParameter* flat;  // what this rank gathered
    at::Tensor items;
  };

  Gather begin(const FlatParameter& flat, Use use) {
    const auto& [shard, item, item_tensor] = homes_.at(&flat);
    check_not_broken();
    Gather gather;
    gather.began = communicator_.log()->now();
    gather.buffer = buffers_.acquire(flat, may_share(flat, use));
    if (travels_encoded(flat, use)) {
      flat.clear_padding(shard);
    }
    if (communicator_.shards() == 1) {
      gather.buffer.whole.copy_(shard);
      return gather;
    }
    explain(flat, gather, [&] {
      if (!communicator_.compares_items(device_)) {
        // On a device ranks would look at what others train too late.
        gather.item = device_.is_cpu() ? at::cat({item_tensor, trained_.words(use == Use::kCompute)}) : item_tensor;
        gather.items = at::empty({communicator_.shards(), gather.item.numel()}, item_tensor.options());
        gather.telling = communicator_.gather_slices(gather.items.view(-1), gather.item);
      }
      const auto& [whole, node_output, _] = gather.buffer;
      const auto number = static_cast<uint64_t>(item);
      gather.work = travels_encoded(flat, use)
                        ? communicator_.gather_slices_encoded(whole, shard, weights_, number, node_output)
                        : communicator_.gather_slices(whole, shard, number, node_output);
    });
    return gather;
  }

  // Waits, and returns the whole.
  at::Tensor finish(const FlatParameter& flat, const Gather& gather) {
    if (!gather.work) {
      return gather.buffer.whole;
    }
    explain(flat, gather, [&] {
      constexpr auto kPurpose = EventLog::Kind::kWaitForGather;
      if (gather.telling) {
        communicator_.wait(gather.telling, kPurpose, flat.unit_name());
        told_.push_back({&flat, gather.items});
        if (device_.is_cpu()) {  // at once, since otherwise the wait that follows may not end
          compare_items();
        }
      }
      communicator_.wait(gather.work, kPurpose, flat.unit_name());
    });
    communicator_.log()->add(EventLog::Kind::kGather, flat.unit_name(), gather.began,
                             static_cast<int64_t>(gather.buffer.whole.nbytes()));
    return buffers_.arrived(gather.buffer);
  }

  void check_not_broken() const {
    TORCH_CHECK_WITH(DistBackendError, !is_broken_, communicator_.context("fully_shard"),
                     "an earlier gather failed, and ranks may be at different ones; start again from a checkpoint.");
  }

  // On a device the host would have to wait for it; there it is done once in a pass.
  void compare_items() {
    for (const auto& [flat, items] : std::exchange(told_, {})) {
      const at::Tensor theirs = items.cpu();
      const int64_t mine = homes_.at(flat).item;
      for (int64_t shard = 0; shard < communicator_.shards(); ++shard) {
        const int64_t item = theirs.const_data_ptr<int64_t>()[shard * theirs.size(1)];
        is_broken_ |= item != mine;
        TORCH_CHECK_WITH(DistBackendError, item == mine, rank_of(shard), " gathers ", describe(item),
                         " while this rank gathers ", flat->describe(),
                         "; make the paths through the model the same, and start again");
      }
      if (device_.is_cpu() && difference_.flat == nullptr) {
        difference_ = trained_.find_difference(theirs.narrow(1, 1, theirs.size(1) - 1));
      }
    }
  }

  std::string rank_of(int64_t shard) const {  // by its number among all ranks, where that is the same
    return c10::str(communicator_.replicas() == 1 ? "rank " : "shard ", shard);
  }

  std::string describe(int64_t item) const {
    const auto found =
        std::find_if(homes_.begin(), homes_.end(), [&](const auto& home) { return home.second.item == item; });
    return found == homes_.end() ? "something else" : found->first->describe();
  }

  template <typename Action>
  void explain(const FlatParameter& flat, const Gather& gather, Action&& action) {
    try {
      action();
    } catch (const c10::Error& error) {
      is_broken_ = true;
      buffers_.forget(gather.buffer);
      C10_THROW_ERROR(DistBackendError, c10::str("[zeropg rank ", communicator_.rank(), "/", communicator_.world_size(),
                                                 "] unshard of ", flat.describe(),
                                                 " failed; expected all ranks to run the same units in the same order "
                                                 "(only where ranks share a node on zeropg may paths differ): ",
                                                 error.what_without_backtrace()));
    } catch (...) {  // where a signal handler ended the waiting the gather goes on
      buffers_.forget(gather.buffer);
      throw;
    }
  }

  Communicator& communicator_;
  Compression weights_;
  GatheredBuffers buffers_;
  const int64_t first_item_;  // items of other models are others, though all else be the same
  std::unordered_map<const FlatParameter*, Home> homes_;
  TrainedFlats trained_;
  TrainedFlats::Difference difference_;                     // found in the gathers of this pass
  std::vector<Told> told_;                                  // not compared yet
  bool is_broken_ = false;                                  // ranks are no more at the same gather
  std::multimap<const FlatParameter*, Gather> prefetched_;  // those of one in the order in which they began
  c10::Device device_ = c10::kCPU;
  Memory memory_;
};

}  // namespace

std::unique_ptr<Fetch> make_gathered_fetch(Communicator& communicator, const ShardingOptions& options,
                                           const std::vector<FlatParameter*>& flats) {
  if (!options.stage.shards_parameters) {
    return nullptr;
  }
  const c10::Device device = flats.empty() ? c10::Device(c10::kCPU) : flats.front()->device();  // they share one
  return std::make_unique<GatheredFetch>(communicator, options, device);
}

}  // namespace zeropg

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <unordered_map>

#include "backend/process_group/process_group.h"
#include "sharding/fetch/registry.h"
#include "sharding/parameters/buffer_pool.h"
#include "sharding/parameters/master.h"

namespace zeropg {
namespace {

constexpr int64_t kFlatAlignmentBytes = 4096;

// Stage 3 where all ranks share a node: the slices of all ranks lie side by side in one shared segment, so the whole
// flat buffer is already there and unsharding moves no byte. One-sided: a rank may take any unit at any time.
//
// Counter protocol (both monotonic, one per rank): kDoneReading = number of updates before which this rank has stopped
// reading; kPublished = number of updates that this rank has finished. An owner writes its slice only when everybody is
// done reading; a reader takes a unit only when every owner has published as many updates as the reader has begun.
// What a rank has to say about an update (`news`) it publishes before it is done reading. Two counters take turns:
// before a rank comes to the next but one update, everybody has begun the next and so has read this one's.
class SharedFetch final : public Fetch {
 public:
  enum Counter { kDoneReading = 0, kPublished = 1, kNews = 2 };  // and kNews + 1

  SharedFetch(Communicator& communicator, std::shared_ptr<SharedSegment> segment,
              c10::intrusive_ptr<ProcessGroupZero> group)
      : communicator_(communicator), segment_(std::move(segment)), group_(std::move(group)) {}

  const char* name() const override { return "shared"; }
  bool is_collective() const override { return false; }

  void adopt(FlatParameter& flat, const at::Tensor& values) override {
    const auto options = values.options().dtype(flat.dtype());
    auto keep = segment_;
    at::Tensor whole = at::from_blob(
        segment_->data() + adopted_bytes_, {flat.layout().total_numel}, [keep](void*) {}, options);
    adopted_bytes_ += flat_bytes(flat);
    wholes_[&flat] = whole;
    make_master(flat, whole.narrow(0, flat.shard_start(), flat.layout().shard_numel), values, flat.shard_start());
    memory_.parameters += flat.layout().shard_numel * static_cast<int64_t>(whole.element_size());
  }

  void end_adoption() override { segment_->publish(kPublished, updates_); }

  void unshard(FlatParameter& flat, Use use) override {
    if (seen_ < updates_) {
      communicator_.timed(
          [&] {
            segment_->wait_all(kPublished, updates_, group_->default_timeout(), "the parameters of the last update");
          },
          EventLog::Kind::kWaitForGather, flat.unit_name());
      seen_ = updates_;
    }
    const at::Tensor& whole = wholes_.at(&flat);
    if (use != Use::kWrite) {
      flat.attach(whole);
      return;
    }
    at::Tensor copy = pool_.acquire(whole.numel(), flat.dtype(), flat.device());
    copy.copy_(whole);
    flat.attach(copy);
  }

  void reshard(FlatParameter& flat) override {
    at::Tensor whole = flat.whole();
    flat.detach();
    if (!whole.is_alias_of(wholes_.at(&flat))) {
      pool_.release(std::move(whole));
    }
  }

  bool begin_update(int64_t news) override {
    const uint64_t update = ++updates_;
    const int news_counter = kNews + static_cast<int>(update % 2);
    segment_->note(news_counter, static_cast<uint64_t>(news));
    segment_->publish(kDoneReading, update);
    try {
      communicator_.timed([&] {
        segment_->wait_all(kDoneReading, update, group_->default_timeout(), "all ranks to finish reading parameters");
      });
    } catch (...) {  // nothing was written: the old values are what this update has, and nobody may wait for others
      segment_->publish(kPublished, update);
      throw;
    }
    bool is_same = true;
    for (int32_t rank = 0; rank < segment_->world_size(); ++rank) {
      is_same &= segment_->read(rank, news_counter) == static_cast<uint64_t>(news);
    }
    return is_same;
  }

  void end_update(const std::vector<FlatParameter*>&, Change /*change*/) override {
    segment_->publish(kPublished, updates_);
  }

  Memory memory() const override { return {memory_.parameters, pool_.allocated_bytes()}; }

  static int64_t flat_bytes(const FlatParameter& flat) {
    return round_up(flat.layout().total_numel * static_cast<int64_t>(c10::elementSize(flat.dtype())),
                    kFlatAlignmentBytes);
  }

 private:
  Communicator& communicator_;
  std::shared_ptr<SharedSegment> segment_;
  c10::intrusive_ptr<ProcessGroupZero> group_;  // of the communicator, which outlives this; its timeout may change
  BufferPool pool_;
  std::unordered_map<const FlatParameter*, at::Tensor> wholes_;
  int64_t adopted_bytes_ = 0;  // of the segment
  uint64_t updates_ = 1;       // the initial values are update 1
  uint64_t seen_ = 0;
  Memory memory_;
};

}  // namespace

std::unique_ptr<Fetch> make_shared_fetch(Communicator& communicator, const ShardingOptions& options,
                                         const std::vector<FlatParameter*>& flats) {
  if (!options.stage.shards_parameters) {
    return nullptr;
  }
  int64_t bytes = 0;
  for (const FlatParameter* flat : flats) {
    if (!flat->device().is_cpu()) {
      return nullptr;
    }
    bytes += SharedFetch::flat_bytes(*flat);
  }
  const auto backend = communicator.groups().shards->getBackend(c10::DeviceType::CPU);
  auto zero = c10::dynamic_intrusive_pointer_cast<ProcessGroupZero>(backend);
  if (zero == nullptr || !zero->is_one_node()) {
    return nullptr;
  }
  const int64_t per_rank = round_up((bytes + communicator.shards() - 1) / communicator.shards(), kFlatAlignmentBytes);
  auto segment = zero->allocate_shared(per_rank);
  return std::make_unique<SharedFetch>(communicator, std::move(segment), std::move(zero));
}

}  // namespace zeropg

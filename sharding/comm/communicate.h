// The few collectives that sharding needs, over any c10d process group, with the time that the caller spends in them.
//
// All functions but `allocate` are collective. Works are returned unfinished; `wait` finishes them. The GIL must not be
// held.
//
// Slices travel between the shards of one copy of the model. What ranks average, or agree upon, is every rank's: where
// the model has replicas, a slice's average takes a second hop between these (Note [Two hops] in two_hops.h).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/group/collective_args.h"
#include "sharding/comm/event_log.h"
#include "sharding/comm/rank_groups.h"
#include "sharding/comm/two_hops.h"
#include "sharding/comm/watched_calls.h"

namespace zeropg {

class NodeOutput;
class ProcessGroupZero;

class Communicator {
 public:
  // `log`: of the model that communicates, which has one for all of its communicators.
  explicit Communicator(RankGroups groups, std::shared_ptr<EventLog> log = std::make_shared<EventLog>());

  // Among all ranks of the model; then which slice this rank has of how many, and which copy of the model.
  int64_t rank() const { return groups_.everybody->getRank(); }
  int64_t world_size() const { return groups_.everybody->getSize(); }
  int64_t shard() const { return groups_.shards->getRank(); }
  int64_t shards() const { return groups_.shards->getSize(); }
  int64_t replica() const { return groups_.replicas ? groups_.replicas->getRank() : 0; }
  int64_t replicas() const { return groups_.replicas ? groups_.replicas->getSize() : 1; }
  const RankGroups& groups() const { return groups_; }
  const std::shared_ptr<EventLog>& log() const { return log_; }

  WatchedCalls& watched_calls() { return watched_; }

  // How an error of `operation` begins: "[zeropg rank 1/4] step: ".
  std::string context(const char* operation) const;

  // --- slices ---
  // `whole` [shards * n] <- every shard's `part` [n]; `part` may be this rank's slice of `whole`. Of any dtype. `item`:
  // which of the caller's things it is, from 1; compared between shards where compares_items().
  // `node_output`, of make_node_output: what is the output instead where it has data() at the end.
  c10::intrusive_ptr<c10d::Work> gather_slices(at::Tensor whole, at::Tensor part, uint64_t item = 0,
                                               std::shared_ptr<NodeOutput> node_output = nullptr);
  bool compares_items(c10::Device device) const;
  // `whole` [shards * n] <- what every shard's `part` [n] decodes to, this rank's too: the same bits on every rank.
  // fp32, fp16 or bf16 on a zeropg group. `part` is not in `whole`.
  c10::intrusive_ptr<c10d::Work> gather_slices_encoded(const at::Tensor& whole, const at::Tensor& part,
                                                       const Compression& compression, uint64_t item = 0,
                                                       std::shared_ptr<NodeOutput> node_output = nullptr);
  // How many ranks of this rank's node gather slices together where a zeropg group of the CPU spans several nodes, some
  // of them with several ranks, and they can share an output; otherwise 1. Not collective, as make_node_output.
  int64_t ranks_that_share_output() const;
  std::shared_ptr<NodeOutput> make_node_output(int64_t bytes);
  // `part` [n] <- this rank's slice of the average of every rank's `whole` [shards * n]. With a codec the bytes travel
  // encoded, between replicas where there are any: fp32 on a zeropg group only. Replicas get the same bits.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_average(at::Tensor part, at::Tensor whole,
                                                        const Compression& compression);

  // Whether the group makes a reduce-scatter of an all-reduce, as gloo does: of a copy that it makes in the call, and
  // with a Work that is not complete before somebody waits. An all-reduce in place then gives the same bits sooner;
  // two ranks exchange slices instead (PairAverage).
  bool scatters_by_all_reduce(c10::Device device) const;
  // Whether the wire has read the `whole` of a reduce_scatter_average, which may then be written; and waiting for it,
  // which another rank's wait for the result never holds up. Other works: whether they are done.
  bool has_read(const c10::intrusive_ptr<c10d::Work>& work);
  void wait_until_read(const c10::intrusive_ptr<c10d::Work>& work);
  // Before this rank waits for anything else than these averages: other ranks may be waiting for its second hops.
  void issue_second_hops();
  // Whether every shard passes the same value. Waits for all of them.
  bool is_same_on_shards(int64_t value, c10::Device device);

  // --- every rank of the model ---
  // `whole` [world_size * n] <- every rank's `part` [n]. Of any dtype, as broadcast.
  c10::intrusive_ptr<c10d::Work> all_gather(at::Tensor whole, at::Tensor part);
  c10::intrusive_ptr<c10d::Work> all_reduce_average(at::Tensor whole, const Compression& compression);
  c10::intrusive_ptr<c10d::Work> all_reduce_max(at::Tensor whole);
  c10::intrusive_ptr<c10d::Work> broadcast(const at::Tensor& whole, int64_t root);

  // Every rank's `values` [n], as [world_size, n] on the CPU. Waits for all of them.
  at::Tensor gather_values(at::IntArrayRef values, c10::Device device);

  // --- replicas of this rank's slice ---
  c10::intrusive_ptr<c10d::Work> broadcast_to_replicas(const at::Tensor& part);  // the first one's; needs replicas

  // Not collective: a buffer of bytes, [bytes], where the collectives of slices, or of all ranks, are fastest: on a
  // zeropg group and the CPU in shared memory, as long as there is room for it there.
  at::Tensor allocate(int64_t bytes, c10::Device device, bool for_slices);
  // Throws c10::Error, of whatever backend the group is, or what a signal handler raised; the work then goes on.
  // `purpose`, `unit`: for the log.
  void wait(const c10::intrusive_ptr<c10d::Work>& work, EventLog::Kind purpose = EventLog::Kind::kWait,
            const std::string& unit = "");

  // Runs `wait`, adds its time to seconds() and notes it in the log: for waits that are not a Work.
  template <typename Wait>
  void timed(Wait&& wait, EventLog::Kind purpose = EventLog::Kind::kWait, const std::string& unit = "") {
    const auto start = std::chrono::steady_clock::now();
    const int64_t began = log_->now();
    wait();
    log_->add(purpose, unit, began);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Time that the training thread has spent waiting for other ranks since the start.
  double seconds() const { return seconds_; }

 private:
  bool is_gloo(c10::Device device) const;
  ProcessGroupZero& zeropg_group(const RankGroups::Group& group) const;

  RankGroups groups_;
  std::shared_ptr<EventLog> log_;
  TwoHopQueue two_hops_;
  double seconds_ = 0;
  WatchedCalls watched_;  // what it begins and waits for
};

// `values` of this rank and of all that have the other parts of tensors in one of RankGroups::splits, in one order on
// all of them, which must call it. Waits for them.
std::vector<double> gather_over_split(Communicator& communicator, int64_t split, std::vector<double> values,
                                      c10::Device device);

// Communicator::gather_values of all ranks of RankGroups::parts; needs them.
at::Tensor gather_values_of_parts(Communicator& communicator, at::IntArrayRef values, c10::Device device);

// Where both are zeropg's, notices that ranks took different paths through the model that gathers over one and reduces
// over the other (Note [Different paths]). `store`: of this model alone; null: nothing is watched. Collective.
void watch_paths(Communicator& gathers, Communicator& reductions, c10::intrusive_ptr<c10d::Store> store);

}  // namespace zeropg

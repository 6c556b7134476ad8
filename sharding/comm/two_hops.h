// Averages that take two hops: among the shards of each copy of the model, and then among the replicas of a slice.
//
// Note [Two hops]
// Between nodes a slice should travel, not the whole. So a slice is averaged among the shards of each copy, and then
// among the replicas, which get the same bits: one all-reduce makes them. No rank may block between the two, and ranks
// see the end of a first hop at different times. So the second hops are issued by whoever polls or waits, but always in
// the order of the first ones, which is the same on all ranks. Each communicator that does this needs a replica group
// of its own: anything else on it would meet the second hops in another order on each rank.
#pragma once

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace zeropg {

class TwoHopQueue;

// Ends with its second hop.
class TwoHops final : public c10d::Work {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  // `issue` begins the second hop when `first`, which has begun, is done.
  TwoHops(TwoHopQueue& queue, WorkPointer first, std::function<WorkPointer()> issue);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

  bool is_first_done() { return first_->isCompleted(); }
  // Throws what a signal handler raised while this rank waits for the first one, to be called again.
  void begin_second();
  bool is_issued() const { return failure_ != nullptr || second_; }

 private:
  TwoHopQueue& queue_;
  WorkPointer first_;
  std::function<WorkPointer()> issue_;
  WorkPointer second_;
  std::exception_ptr failure_;
};

// The averages of one communicator whose second hops are not issued, in the order of the calls.
class TwoHopQueue {
 public:
  TwoHopQueue() = default;
  TwoHopQueue(const TwoHopQueue&) = delete;  // works refer to it

  c10::intrusive_ptr<c10d::Work> add(TwoHops::WorkPointer first, std::function<TwoHops::WorkPointer()> issue);
  // Issue the second hops whose first ones are done; or wait for these, and issue those of all, or of all up to `last`.
  void issue_ready();
  void issue_all();
  void issue_to(const TwoHops& last);

 private:
  void issue_next();

  std::deque<c10::intrusive_ptr<TwoHops>> waiting_;
};

}  // namespace zeropg

// Tells all ranks when a round begins. Rank 0 hears which ranks have come to it, asks its RoundGate, and when enough
// are there waits a little for the others, so that nobody misses a round by a hair.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/partial/round_gate.h"

namespace zeropg {

// Every rank has one. Messages travel over a group that nothing else uses and whose operations have no deadline:
// between two steps a program may do something else for hours.
class RoundStart {
 public:
  // patience: the share of a step's time that a round waits for late ranks. Before there is such a time it waits for
  // all.
  RoundStart(c10::intrusive_ptr<c10d::ProcessGroup> messages, RoundGate gate, double patience);
  ~RoundStart();  // after abandon, or after the end has come

  // This rank has come to its first `count` rounds; kEnd: it comes to no further one.
  void tell(int64_t count);
  static constexpr int64_t kEnd = -1;
  // Waits until the next round begins, on one thread of its own: its number, or kEnd when all ranks have said it.
  // Throws what ended the messages: a rank that died or left, or abandon.
  int64_t next();
  // On rank 0: who has not come to a round, as "1, 3"; elsewhere "".
  std::string missing(int64_t round);
  // Lets nobody wait any more, here and on the other ranks.
  void abandon();

 private:
  using Clock = std::chrono::steady_clock;

  struct Message {
    at::Tensor content;
    c10::intrusive_ptr<c10d::Work> work;
  };

  bool is_first() const { return messages_->getRank() == 0; }
  // On rank 0.
  void listen();
  void note(int32_t rank, int64_t count);
  int64_t begin_next();
  // With the lock held.
  bool waits_for_late(std::unique_lock<std::mutex>& lock);
  void announce(int64_t round);
  void send(int32_t rank, int tag, at::Tensor content);

  c10::intrusive_ptr<c10d::ProcessGroup> messages_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> sent_;  // those that may still be on their way
  // Of rank 0:
  RoundGate gate_;
  double patience_;
  int64_t begun_ = 0;  // rounds
  int32_t ended_ = 0;  // ranks that have said kEnd
  Clock::time_point enough_since_ = Clock::time_point::max();
  Clock::time_point last_step_;
  std::deque<Clock::duration> step_times_;  // the last ones
  std::exception_ptr failure_;
  std::thread listener_;
};

}  // namespace zeropg

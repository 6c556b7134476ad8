// Averages of gradients that do not wait for late ranks: partial collectives (Li et al. 2020, "Taming Unbalanced
// Training Workloads in Deep Learning with Partial Collective Operations", PPoPP, section 4, with a quorum).
//
// All ranks get the same bits in every round. A rank that comes too late to a round gets the round's result at once,
// and its gradient goes into its residual, which takes part in the next round of the same tensor, whether or not the
// rank has come to that one. So every gradient counts once. A thread of this class takes part for its rank meanwhile:
// it makes up for a rank that computes for longer than others, not for a process that stands still.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend/partial/round_start.h"

namespace zeropg {

class PartialReducer {
 public:
  // numels: of a step's tensors, in their order; round r is of tensor r % numels.size(). The same on all ranks, as is
  // the rest.
  struct Options {
    std::vector<int64_t> numels;
    at::ScalarType dtype = at::kFloat;  // in which is summed: kFloat or kDouble
    double tolerance = 0;               // the share of ranks that may miss a round, in [0, 1)
    int64_t max_steps_behind = 1;
    double patience = 0;                   // see RoundStart
    std::chrono::milliseconds timeout{0};  // of a wait for a round
  };

  // Not collective. `rounds`, `messages`: two zeropg groups of the same ranks for the CPU that nothing else uses;
  // operations of `messages` have no deadline.
  PartialReducer(c10::intrusive_ptr<c10d::ProcessGroup> rounds, c10::intrusive_ptr<c10d::ProcessGroup> messages,
                 Options options);
  ~PartialReducer();  // without close: the other ranks' rounds fail

  // This rank's next round: takes a copy of `gradient`, of a float dtype on the CPU, and returns the round's number.
  // A step's rounds may be posted before any is waited for. ValueError for another number of elements.
  int64_t post(const at::Tensor& gradient);
  // Waits until a round of this rank has begun and its sums are there: `average` (contiguous, as posted) <- the sum of
  // what ranks contributed / ranks. Returns [ranks] of which ranks contributed what they had posted for this round.
  // Each round is waited for once. DistBackendError where a rank died or left, and after the timeout.
  std::vector<bool> wait(int64_t round, const at::Tensor& average);
  // Collective, between steps, when every rank has posted and waited for the same rounds: what ranks have not
  // contributed yet, summed over the ranks, one tensor for each of a step. It stays owed.
  std::vector<at::Tensor> owed();
  // Added to what this rank owes; as owed() gives it.
  void owe(const std::vector<at::Tensor>& sums);
  // Collective: ends the threads of all ranks when each has called it. DistBackendError after the timeout.
  void close();

 private:
  int64_t ranks() const { return rounds_->getSize(); }
  std::string context(const char* operation) const;
  void check_process() const;
  void take_part();
  at::Tensor take_contribution(int64_t round);
  void add_to_residual(int64_t tensor, const at::Tensor& gradient);  // with the lock held
  std::unique_lock<std::mutex> lock_for(const char* operation);      // throws where it has failed, or is closed
  void check_not_failed(const char* operation) const;                // with the lock held

  c10::intrusive_ptr<c10d::ProcessGroup> rounds_;
  Options options_;
  std::unique_ptr<RoundStart> start_;
  int64_t process_;  // its id: threads do not outlive a fork
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t posted_ = 0;                     // rounds that this rank has come to
  int64_t begun_ = 0;                      // rounds in which it has taken part
  int64_t waited_ = 0;                     // rounds whose sums the program has
  std::map<int64_t, at::Tensor> waiting_;  // posted and not begun
  std::map<int64_t, at::Tensor> done_;     // and not waited for: sums, [numel + ranks]
  std::vector<at::Tensor> residuals_;      // undefined: nothing is owed
  std::string failure_;
  bool is_closed_ = false;       // by the program
  bool has_ended_well_ = false;  // all ranks have closed it
  std::thread participant_;
};

}  // namespace zeropg

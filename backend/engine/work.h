// What a caller holds while an operation runs.
//
// Note [Tensor references]
// Destroying a tensor may need Python's GIL (its PyObject goes with it), and the progress thread must never wait for
// the GIL: a thread that holds it may be waiting for that thread. So a Work owns the tensors of its operation, and the
// progress thread hands works to RetiredWorks, where the next thread that calls into the group destroys them. A thread
// that waits for a work takes it out of there; it destroys all its tensors but the outputs, which are the caller's to
// ask for as long as the work lives.
#pragma once

#include <torch/version.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/group/operation_label.h"
#include "backend/group/timeouts.h"

namespace zeropg {

class ZeroWork;

// What runs an operation, as the threads see it that wait for it: the queue that it is in.
class OperationHost {
 public:
  virtual ~OperationHost() = default;

  // Runs operations in the calling thread until `work` is complete, `until` has passed, or the thread would have to
  // sleep: then the progress thread goes on. Lets signal handlers run, whose exceptions it passes on. Throws
  // DistBackendError in a forked child, where nobody would ever run the operation.
  virtual void help(const ZeroWork& work, std::chrono::steady_clock::time_point until) = 0;
  // "waiting for rank 2", for messages only.
  virtual std::string who_is_late() = 0;
  // Somebody has waited for the work: only its callers still need it.
  virtual void forget(const ZeroWork& work) = 0;
};

class ZeroWork final : public c10d::Work {
 public:
  struct Tensors {
    std::vector<at::Tensor> outputs;     // what result() and the future give
    std::vector<at::Tensor> held;        // inputs, list entries, contiguous copies
    std::vector<c10::Storage> storages;  // where the bytes lie: `tensor.data = other` takes them from a tensor
    // (destination, source): what a collective copies before it runs, in this order
    std::vector<std::pair<at::Tensor, at::Tensor>> copies_in;
    // (destination, source): contiguous outputs that go back into the caller's strided tensors
    std::vector<std::pair<at::Tensor, at::Tensor>> copies_back;
  };

  ZeroWork(OperationLabel label, c10d::OpType type, Tensors tensors, OperationTimeout timeout,
           std::shared_ptr<OperationHost> host);

  // The waiting thread runs the operation itself as long as it need not sleep. Throws the operation's error;
  // DistBackendError when `timeout` passes first (the operation goes on); what a signal handler throws.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override;
  // Value: the list of output tensors. Callbacks run on a thread of their own.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return label_.sequence; }
  float getDuration() const override;  // milliseconds from submission to completion
  int sourceRank() const override { return source_rank_; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  std::chrono::milliseconds getTimeout() const override { return timeout_.timeout; }
  uint64_t getCompletionKey() const override { return completion_key(); }
#endif
  uint64_t completion_key() const { return key_; }  // unique in this process, never reused

  float elapsed_ms() const;  // since submission
  // As isCompleted(), without a lock.
  bool is_complete() const { return is_complete_.load(std::memory_order_acquire); }
  const OperationLabel& label() const { return label_; }
  std::chrono::milliseconds timeout() const { return timeout_.timeout; }
  void set_source_rank(int rank) { source_rank_ = rank; }  // before complete()

  // Called once, by the thread that runs the operation, before it reads the inputs.
  void copy_in() const;
  // Called once, by the thread that ran the operation. A null `error` is success. Returns what completes the future,
  // null where nobody asked for one: the caller runs it elsewhere, without locks, since its callbacks may be Python,
  // and may wait.
  std::function<void()> complete(std::exception_ptr error);

 private:
  void release_tensors(std::unique_lock<std::mutex>& lock);
  std::string describe_late() const;

  const OperationLabel label_;
  const OperationTimeout timeout_;
  const uint64_t key_;
  const std::chrono::steady_clock::time_point start_;
  const std::shared_ptr<OperationHost> host_;       // life shared with the group's runtime
  Tensors tensors_;                                 // guarded by mutex_ (of the base class)
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
  float duration_ms_ = 0;                           // guarded by mutex_
  std::atomic<bool> is_complete_{false};
  int source_rank_ = -1;
};

// A work that is complete when all of `works` are, and fails as the first of them that fails.
c10::intrusive_ptr<c10d::Work> combine(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace zeropg

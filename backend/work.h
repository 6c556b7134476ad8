// What a caller holds while an operation runs.
//
// Note [Tensor references]
// Destroying a tensor may need Python's GIL (its PyObject goes with it), and the progress thread must never wait for
// the GIL: a thread that holds it may be waiting for that thread. So a Work owns the tensors of its operation, a thread
// that waits for it takes them out and destroys them, and what nobody waited for is handed to Group::retire and is
// destroyed by the next thread that calls into the group.
#pragma once

#include <torch/version.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/callback_threads.h"
#include "backend/request.h"
#include "backend/timeouts.h"

namespace zeropg {

class ZeroWork final : public c10d::Work {
 public:
  struct Tensors {
    std::vector<at::Tensor> outputs;  // what result() and the future give
    std::vector<at::Tensor> held;     // inputs, list entries, contiguous copies
    // (destination, source): contiguous outputs that go back into the caller's strided tensors
    std::vector<std::pair<at::Tensor, at::Tensor>> copies_back;
  };

  // `who_is_late` describes what the operation waits for ("waiting for rank 2"); called when wait() times out.
  ZeroWork(OperationLabel label, c10d::OpType type, Tensors tensors, OperationTimeout timeout,
           std::shared_ptr<CallbackThreads> callbacks, std::function<std::string()> who_is_late);

  // Throws the operation's error; DistBackendError when `timeout` passes first (the operation goes on).
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
  const OperationLabel& label() const { return label_; }
  std::chrono::milliseconds timeout() const { return timeout_.timeout; }
  void set_source_rank(int rank) { source_rank_ = rank; }  // before complete()

  // Called once, by the thread that ran the operation. A null `error` is success.
  void complete(std::exception_ptr error);

 private:
  void release_tensors(std::unique_lock<std::mutex>& lock);
  std::vector<at::Tensor> outputs_locked() const;

  const OperationLabel label_;
  const OperationTimeout timeout_;
  const uint64_t key_;
  const std::chrono::steady_clock::time_point start_;
  std::shared_ptr<CallbackThreads> callbacks_;  // life shared with the engine
  std::function<std::string()> who_is_late_;
  Tensors tensors_;                                                        // guarded by mutex_ (of the base class)
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> released_outputs_;  // guarded by mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_;                         // guarded by mutex_
  float duration_ms_ = 0;                                                  // guarded by mutex_
  int source_rank_ = -1;
};

// A work that is complete when all of `works` are, and fails as the first of them that fails.
c10::intrusive_ptr<c10d::Work> combine(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace zeropg

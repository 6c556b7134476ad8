#include "backend/engine/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

// A number per operation is not state that groups share: nothing reads it but to tell operations apart.
uint64_t next_completion_key() {
  static std::atomic<uint64_t> key{1};
  return key.fetch_add(1, std::memory_order_relaxed);
}

void complete_future(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                     const std::exception_ptr& error) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(outputs));
  }
}

void copy(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  if (copies.empty()) return;
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& [destination, source] : copies) {
    destination.copy_(source);
  }
}

std::exception_ptr copy_back(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies) {
  try {
    copy(copies);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

class CombinedWork final : public c10d::Work {
 public:
  explicit CombinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    const auto failed = std::find_if(works_.begin(), works_.end(), [](const auto& work) { return !work->isSuccess(); });
    return failed == works_.end() ? nullptr : (*failed)->exception();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  void synchronize() override {}
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> results;
    for (const auto& work : works_) {
      const std::vector<at::Tensor> of_work = work->result();
      results.insert(results.end(), of_work.begin(), of_work.end());
    }
    return results;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) {
      futures.push_back(work->getFuture());
    }
    return c10::collectAll(futures)->then(
        [](c10::ivalue::Future& all) {
          c10::List<at::Tensor> results;
          for (const c10::IValue& future : all.value().toListRef()) {
            results.append(future.toFuture()->value().toTensorList());
          }
          return c10::IValue(results);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> combine(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  return c10::make_intrusive<CombinedWork>(std::move(works));
}

ZeroWork::ZeroWork(OperationLabel label, c10d::OpType type, Tensors tensors, OperationTimeout timeout,
                   std::shared_ptr<OperationHost> host)
    : Work(label.rank, type, label.title, std::optional(tensors.held.empty() ? tensors.outputs : tensors.held)),
      label_(std::move(label)),
      timeout_(std::move(timeout)),
      key_(next_completion_key()),
      start_(std::chrono::steady_clock::now()),
      host_(std::move(host)),
      tensors_(std::move(tensors)) {}

bool ZeroWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const bool is_limited = timeout != kNoTimeout && timeout.count() >= 0;
  const Clock::time_point until = is_limited ? Clock::now() + bounded(timeout) : Clock::time_point::max();
  const WaitingThread thread;
  if (!is_complete()) {
    host_->help(*this, until);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    const auto now = Clock::now();
    if (cv_.wait_until(lock, std::min(until, now + kSignalCheckInterval), [&] { return completed_; })) {
      break;
    }
    lock.unlock();
    TORCH_CHECK_WITH(DistBackendError, Clock::now() < until, label_.prefix(), ": not complete after the ",
                     timeout.count(), " ms that wait() was given", describe_late(),
                     "; wait again with more time, or abort the group.");
    check_signals();
    lock.lock();
  }
  if (exception_) {
    std::exception_ptr error = exception_;
    release_tensors(lock);
    std::rethrow_exception(error);
  }
  release_tensors(lock);
  return true;
}

std::string ZeroWork::describe_late() const {
  const std::string late = host_->who_is_late();
  return late.empty() ? late : ", " + late;
}

// Takes all tensors but the outputs out under the lock and destroys them after it.
void ZeroWork::release_tensors(std::unique_lock<std::mutex>& lock) {
  Tensors tensors = std::exchange(tensors_, Tensors{.outputs = tensors_.outputs});
  lock.unlock();
  host_->forget(*this);
}

std::vector<at::Tensor> ZeroWork::result() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tensors_.outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> ZeroWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) {
      complete_future(*future_, tensors_.outputs, exception_);
    }
  }
  return future_;
}

float ZeroWork::elapsed_ms() const {
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start_).count();
}

float ZeroWork::getDuration() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(completed_, label_.prefix(), ": has no duration before it is complete; wait for it first.");
  return duration_ms_;
}

// Nobody else touches tensors_ before completion.
void ZeroWork::copy_in() const { copy(tensors_.copies_in); }

std::function<void()> ZeroWork::complete(std::exception_ptr error) {
  timeout_.end_extensions();
  if (!error) {
    error = copy_back(tensors_.copies_back);  // nobody else touches tensors_ before completion
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<at::Tensor> outputs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    duration_ms_ = elapsed_ms();
    completed_ = true;
    exception_ = error;
    is_complete_.store(true, std::memory_order_release);
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
    future = future_;
    if (future) {
      outputs = tensors_.outputs;
    }
  }
  cv_.notify_all();
  if (!future) return nullptr;
  return [future = std::move(future), outputs = std::move(outputs), error = std::move(error)] {
    complete_future(*future, outputs, error);
  };
}

}  // namespace zeropg

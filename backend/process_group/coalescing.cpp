// Blocks in which calls are coalesced: their works end as one. A block belongs to the thread that opened it: what other
// threads call meanwhile is not part of it.
#include "backend/process_group/process_group.h"

namespace zeropg {

namespace {

class FailedWork final : public c10d::Work {
 public:
  explicit FailedWork(std::exception_ptr error) { finish(std::move(error)); }
};

}  // namespace

// c10d does not say for which device the block is: the first CUDA tensor in it opens NCCL's. A block that an exception
// left open ends here.
void ProcessGroupZero::startCoalescing() {
  CoalescedCalls left_open;  // dies without the lock: tensors may need the GIL, whose holder may wait for the lock
  std::lock_guard<std::mutex> lock(inner_mutex_);
  std::swap(coalescing_[std::this_thread::get_id()], left_open);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::endCoalescing() {
  CoalescedCalls calls;  // likewise
  {
    std::lock_guard<std::mutex> lock(inner_mutex_);
    if (auto block = coalescing_.extract(std::this_thread::get_id()); !block.empty()) {
      calls = std::move(block.mapped());
    }
    if (calls.has_cuda) {
      if (auto work = cuda_backend_->endCoalescing()) {
        calls.works.push_back(std::move(work));
      }
    }
  }
  if (calls.error) {
    std::rethrow_exception(calls.error);
  }
  return calls.works.size() == 1 ? calls.works[0] : combine(std::move(calls.works));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::coalesce(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (const auto block = coalescing_.find(std::this_thread::get_id()); block != coalescing_.end()) {
    block->second.works.push_back(work);
  }
  return work;
}

// What is wrong with a message is said where its block ends: after an error in the middle of batch_isend_irecv, torch
// would take the block for open as long as the group lives, and only note its all-reduces instead of calling them.
c10::intrusive_ptr<c10d::Work> ProcessGroupZero::coalesce_message(
    const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  try {
    return start();
  } catch (...) {
    std::lock_guard<std::mutex> lock(inner_mutex_);
    const auto block = coalescing_.find(std::this_thread::get_id());
    if (block == coalescing_.end()) {
      throw;
    }
    if (!block->second.error) {
      block->second.error = std::current_exception();
    }
    return c10::make_intrusive<FailedWork>(std::current_exception());
  }
}

}  // namespace zeropg

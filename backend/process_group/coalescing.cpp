// Blocks in which calls are coalesced: their works end as one. A block belongs to the thread that opened it: what other
// threads call meanwhile is not part of it.
#include "backend/process_group/process_group.h"

namespace zeropg {

// c10d does not say for which device the block is: the first CUDA tensor in it opens NCCL's. A block that an exception
// left open ends here.
void ProcessGroupZero::startCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  coalescing_[std::this_thread::get_id()].works.clear();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::endCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  auto block = coalescing_.extract(std::this_thread::get_id());
  CoalescedCalls calls = block.empty() ? CoalescedCalls() : std::move(block.mapped());
  if (calls.has_cuda) {
    if (auto work = cuda_backend_->endCoalescing()) {
      calls.works.push_back(std::move(work));
    }
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

}  // namespace zeropg

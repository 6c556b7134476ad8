// Windows in which calls are coalesced: their works end as one.
#include "backend/process_group/process_group.h"

namespace zeropg {

// c10d does not say for which device the window is: the first CUDA tensor in it opens NCCL's.
void ProcessGroupZero::startCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::endCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = false;
  if (std::exchange(is_cuda_coalescing_, false)) {
    if (auto work = cuda_backend_->endCoalescing()) {
      coalesced_.push_back(std::move(work));
    }
  }
  return coalesced_.size() == 1 ? std::exchange(coalesced_, {})[0] : combine(std::exchange(coalesced_, {}));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::coalesce(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (is_coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

}  // namespace zeropg

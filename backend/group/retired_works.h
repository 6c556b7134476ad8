// Works that the progress thread has ended: Note [Tensor references] in work.h.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace zeropg {

// Any thread.
class RetiredWorks {
 public:
  // Takes a work in that `complete` completes, under a lock: who has waited for it then, and removes it, finds it here.
  template <typename Complete>
  void add(c10::intrusive_ptr<c10d::Work> work, const Complete& complete) {
    std::lock_guard<std::mutex> lock(mutex_);
    complete();
    works_.push_back(std::move(work));
  }
  // Gives up one that is here; the caller has a reference of its own.
  void remove(const c10d::Work& work) {
    c10::intrusive_ptr<c10d::Work> removed;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(works_.begin(), works_.end(), [&](const auto& other) { return other.get() == &work; });
    if (found == works_.end()) return;
    removed = std::move(*found);
    works_.erase(found);
  }
  // Destroys them, and with them tensors: not on the progress thread.
  void release() {
    std::vector<c10::intrusive_ptr<c10d::Work>> released;
    std::lock_guard<std::mutex> lock(mutex_);
    released.swap(works_);
  }

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;  // guarded by mutex_
};

}  // namespace zeropg

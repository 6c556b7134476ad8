#include "backend/windows/signal_queue.h"

#include <utility>

namespace zeropg {

SignalQueue::Place::Place(std::shared_ptr<SignalQueue> queue) : queue_(std::move(queue)) {
  std::lock_guard<std::mutex> lock(queue_->mutex_);
  among_waiting_ = queue_->waiting_.insert(queue_->waiting_.end(), this);
}

SignalQueue::Place::~Place() {
  std::lock_guard<std::mutex> lock(queue_->mutex_);
  if (!has_signal_) {
    queue_->waiting_.erase(among_waiting_);
  } else if (!has_taken_) {
    --queue_->given_;
  }
}

bool SignalQueue::Place::take(uint64_t come) {
  std::lock_guard<std::mutex> lock(queue_->mutex_);
  std::list<Place*>& waiting = queue_->waiting_;
  for (; queue_->given_ < come && !waiting.empty(); ++queue_->given_) {
    waiting.front()->has_signal_ = true;
    waiting.pop_front();
  }
  has_taken_ = has_signal_;
  return has_taken_;
}

}  // namespace zeropg

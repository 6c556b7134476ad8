#include "sharding/offload/transfer_queue.h"

#include <algorithm>

namespace zeropg {

TransferQueue::TransferQueue(int64_t threads) {
  for (int64_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { serve(); });
  }
}

TransferQueue::~TransferQueue() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

std::future<void> TransferQueue::run(uint64_t offset, uint64_t bytes, bool is_write, std::function<void()> action) {
  std::packaged_task<void()> task(std::move(action));
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back({offset, bytes, is_write, false, std::move(task)});
  }
  changed_.notify_one();
  return done;
}

TransferQueue::Jobs::iterator TransferQueue::next() {
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    const bool is_blocked = job->is_running || std::any_of(jobs_.begin(), job, [&](const Job& before) {
                              return (before.is_write || job->is_write) && before.offset < job->offset + job->bytes &&
                                     job->offset < before.offset + before.bytes;
                            });
    if (!is_blocked) return job;
  }
  return jobs_.end();
}

void TransferQueue::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto job = next();
    if (job == jobs_.end()) {
      if (is_ending_ && jobs_.empty()) return;
      changed_.wait(lock);
      continue;
    }
    job->is_running = true;
    lock.unlock();
    job->task();
    lock.lock();
    jobs_.erase(job);
    changed_.notify_all();  // it may have blocked others, and the queue may be empty
  }
}

}  // namespace zeropg

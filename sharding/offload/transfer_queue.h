// Threads that run transfers of one file, those whose bytes overlap in the order in which they were asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace zeropg {

// A forked child has the memory but not the threads: it must neither use nor destroy a queue of its parent's.
class TransferQueue {
 public:
  explicit TransferQueue(int64_t threads);
  ~TransferQueue();  // runs what is queued, then ends the threads
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  // Runs `action` on one of the threads; what it throws is thrown by the future.
  std::future<void> run(uint64_t offset, uint64_t bytes, bool is_write, std::function<void()> action);

 private:
  struct Job {
    uint64_t offset;
    uint64_t bytes;
    bool is_write;
    bool is_running;
    std::packaged_task<void()> task;
  };
  using Jobs = std::list<Job>;

  void serve();
  Jobs::iterator next();  // the first that nothing before it blocks, or end; mutex_ is held

  std::mutex mutex_;
  std::condition_variable changed_;
  Jobs jobs_;               // in order of arrival, the running ones too; guarded by mutex_
  bool is_ending_ = false;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace zeropg

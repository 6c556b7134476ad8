#include "backend/callback_threads.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace zeropg {

struct CallbackThreads::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;  // guarded by mutex
  size_t idle = 0;                          // guarded by mutex
  bool is_stopping = false;                 // guarded by mutex
  std::vector<std::thread> threads;         // guarded by mutex
  pid_t owner = ::getpid();

  std::vector<std::thread> stop() {
    std::vector<std::thread> stopped;
    {
      std::lock_guard<std::mutex> lock(mutex);
      is_stopping = true;
      stopped.swap(threads);
    }
    wake.notify_all();
    return stopped;
  }

  void run() {
    pthread_setname_np(pthread_self(), "zeropg-callback");
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      ++idle;
      wake.wait(lock, [&] { return is_stopping || !queue.empty(); });
      --idle;
      if (queue.empty()) {
        return;
      }
      std::function<void()> callback = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;  // destroys what it captured before the lock is taken: that may need the GIL
      lock.lock();
    }
  }
};

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() {
  if (state_->owner != ::getpid()) {
    new std::shared_ptr<State>(std::move(state_));  // a forked child has no such threads: leak their handles
    return;
  }
  for (std::thread& thread : state_->stop()) {
    thread.detach();
  }
}

void CallbackThreads::stop() {
  for (std::thread& thread : state_->stop()) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void CallbackThreads::post(std::function<void()> callback) {
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (state_->is_stopping) {
      lock.unlock();
      callback();
      return;
    }
    state_->queue.push_back(std::move(callback));
    if (state_->idle < state_->queue.size()) {
      state_->threads.emplace_back([state = state_] { state->run(); });
    }
  }
  state_->wake.notify_one();
}

}  // namespace zeropg

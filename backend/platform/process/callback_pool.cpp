#include "backend/platform/process/callback_pool.h"

#include <c10/util/StringUtil.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "backend/diagnostics/notices.h"

namespace zeropg {

struct CallbackPool::State {
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

  // One idle thread is kept for the next callback; that many were needed at once is no reason to keep them all.
  bool has_left_as_surplus() {
    if (idle == 0 || !queue.empty() || is_stopping) return false;
    const auto own = std::find_if(threads.begin(), threads.end(), [](const std::thread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
    own->detach();  // it touches nothing but the lock from here on
    threads.erase(own);
    return true;
  }

  void run() {
    pthread_setname_np(pthread_self(), "zeropg-callback");
    std::unique_lock<std::mutex> lock(mutex);
    while (!has_left_as_surplus()) {
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

CallbackPool::CallbackPool() : state_(std::make_shared<State>()) {}

CallbackPool::~CallbackPool() {
  if (state_->owner != ::getpid()) {
    new std::shared_ptr<State>(std::move(state_));  // a forked child has no such threads: leak their handles
    return;
  }
  let_go();
}

void CallbackPool::let_go() {
  for (std::thread& thread : state_->stop()) {
    thread.detach();
  }
}

void CallbackPool::stop() {
  for (std::thread& thread : state_->stop()) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void CallbackPool::post(std::function<void()> callback) {
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (state_->is_stopping) {
      lock.unlock();
      callback();
      return;
    }
    state_->queue.push_back(std::move(callback));
    if (state_->idle < state_->queue.size()) {
      try {
        state_->threads.emplace_back([state = state_] { state->run(); });
      } catch (const std::system_error& error) {  // it waits for one of ours, or runs in this one
        notice("threads", c10::str("[zeropg] cannot start another thread (", error.what(),
                                   "), so callbacks of futures wait for each other or hold up communication; raise "
                                   "`ulimit -u` or the container's limit of processes."));
        if (state_->threads.empty()) {
          callback = std::move(state_->queue.back());
          state_->queue.pop_back();
          lock.unlock();
          callback();
          return;
        }
      }
    }
  }
  state_->wake.notify_one();
}

}  // namespace zeropg

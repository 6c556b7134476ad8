// The one progress thread of the process.
//
// Note [Progress thread]
// It advances the head of every channel of every group in turn, so groups that are used in different order on different
// ranks cannot deadlock. It starts with the first channel, so that a group that exists can rely on it, never runs user
// code, never takes the GIL and never owns the last reference of a tensor. It ends when the last channel is removed.
// After a fork the child has an engine of its own: threads do not survive a fork, and the parent's channels are not the
// child's to advance.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/platform/process/callback_pool.h"

namespace zeropg {

enum class Activity : uint8_t { kIdle, kBlocked, kMoved };

// What the progress thread sleeps on, beside the doorbell.
struct Sleep {
  static constexpr std::chrono::milliseconds kForGood{3'600'000};

  int descriptor = -1;                         // that can be read when there is something to do; -1: none
  std::chrono::milliseconds limit = kForGood;  // the thread looks here again after it, whatever it hears
};

// What the engine advances of one group.
class Channel {
 public:
  virtual ~Channel() = default;
  // Runs what can run without waiting. Errors end operations, they never escape.
  virtual Activity advance_on_engine_thread() = 0;
  // Ends operations whose deadline has passed, whose group has failed or whose peers are gone. Makes system calls.
  virtual void check_on_engine_thread() = 0;
  // Tells the peers whether they have to ring the doorbell of this process. Without effect where nothing waits.
  virtual void set_sleeping(bool is_sleeping) = 0;
  // Asked right before the thread sleeps. arm() follows where there is a descriptor; false: there is something to do
  // already.
  virtual Sleep sleep() const { return {}; }
  virtual bool arm() { return true; }
  // Ranks on this node in the channel's group.
  virtual int32_t local_world_size() const = 0;
};

class ProgressEngine {
 public:
  // The process's engine. The one object that is shared by all groups: it holds no state of any of them.
  static ProgressEngine& of_this_process();

  // `channels` must be removed before they are destroyed. std::system_error when the thread cannot be started.
  void add(const std::vector<Channel*>& channels);
  // The engine does not touch the channels after this. With the last channel it joins the thread, and those of
  // callbacks or lets them end by themselves; the GIL must not be held.
  void remove(const std::vector<Channel*>& channels, bool waits_for_callbacks);
  // There is something to do. Any thread.
  void wake();
  // There is something to do that the calling thread will normally do itself, by waiting for it: the progress thread
  // looks within a millisecond. Cheaper than wake(), and it does not take a CPU from the ranks that work. Any thread.
  void wake_soon();

  // Alive while there is a channel.
  std::shared_ptr<CallbackPool> callbacks();
  int32_t ranks_on_node() const { return ranks_on_node_.load(std::memory_order_relaxed); }

 private:
  ProgressEngine() = default;
  void run();
  void sleep();
  std::chrono::milliseconds idle_sleep();
  Activity advance_all();

  std::mutex life_;                          // serialises add, remove and the thread's start and end
  std::thread thread_;                       // guarded by life_
  std::mutex mutex_;                         // held by the thread during a pass over the channels
  std::vector<Channel*> channels_;           // guarded by mutex_
  std::vector<int> descriptors_;             // of the thread
  std::shared_ptr<CallbackPool> callbacks_;  // guarded by life_; life shared with the works
  std::atomic<int32_t> removers_{0};         // threads that wait for mutex_: the pass lets them in
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> is_sleeping_{false};
  std::atomic<bool> is_napping_{false};  // asleep for a moment only, whether or not somebody wakes it
  std::atomic<bool> has_call_{false};    // by wake_soon() since the last nap
  int32_t naps_left_ = 0;                // of the thread
  std::atomic<int32_t> ranks_on_node_{1};
};

}  // namespace zeropg

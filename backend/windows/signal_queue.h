// Who gets the next signal of a peer: the one who has waited longest.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

namespace zeropg {

// Any thread.
class SignalQueue {
 public:
  // One who waits. Whoever leaves before it has taken its signal leaves it to the next one.
  class Place {
   public:
    explicit Place(std::shared_ptr<SignalQueue> queue);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // Whether its signal is among the first `come`; once it has been, it stays so.
    bool take(uint64_t come);

   private:
    friend class SignalQueue;
    const std::shared_ptr<SignalQueue> queue_;   // life shared with the window
    std::list<Place*>::iterator among_waiting_;  // while it has no signal; guarded by the queue's mutex_
    bool has_signal_ = false;                    // guarded by it, too
    bool has_taken_ = false;                     // guarded by it, too
  };

 private:
  std::mutex mutex_;
  std::list<Place*> waiting_;  // guarded by mutex_; the oldest first
  uint64_t given_ = 0;         // guarded by mutex_
};

}  // namespace zeropg

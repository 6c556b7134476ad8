// Runs the callbacks of completed futures away from the progress thread.
//
// A callback may be Python and may itself wait for another collective (DDP's PowerSGD hook does), so the progress
// thread must never run one, and a second callback must never queue behind one that waits. The number of threads
// therefore grows with the number of callbacks that are blocked at the same time; one idle thread is kept for the next
// callback.
#pragma once

#include <functional>
#include <memory>

namespace zeropg {

class CallbackPool {
 public:
  CallbackPool();
  // Never waits: a Work may be the last owner, and die while its thread holds the GIL.
  ~CallbackPool();
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  // `callback` must not throw. After stop() it runs in the calling thread.
  void post(std::function<void()> callback);

  // Runs what was posted and ends the threads. The GIL must not be held. From inside a callback: does not wait for it.
  void stop();
  // The same without a wait: the threads end once they have run what was posted.
  void let_go();

 private:
  struct State;                   // shared with the threads: they may outlive this object, see the destructor
  std::shared_ptr<State> state_;  // life shared with the threads
};

}  // namespace zeropg

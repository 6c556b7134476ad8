// What runs the operations of one process group, and how that ends.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "backend/engine/collective_queue.h"
#include "backend/engine/progress_engine.h"
#include "backend/group/group_context.h"
#include "backend/p2p/point_to_point.h"
#include "backend/windows/window_traffic.h"

namespace zeropg {

// The group, and what the engine advances of it: its queues and its connections to other nodes.
class GroupRuntime {
 public:
  // Joins the engine. The result must be closed before its last owner lets it go. DistBackendError, here and on the
  // peers, when the engine cannot start its thread.
  static std::shared_ptr<GroupRuntime> open(std::shared_ptr<GroupContext> group, bool may_use_cma);
  GroupRuntime(const GroupRuntime&) = delete;
  GroupRuntime& operator=(const GroupRuntime&) = delete;

  GroupContext& group() { return *group_; }
  const std::shared_ptr<GroupContext>& shared_group() { return group_; }
  ProgressEngine& engine() { return engine_; }
  const std::shared_ptr<CollectiveQueue>& collectives() { return collectives_; }
  const std::shared_ptr<PointToPoint>& messages() { return messages_; }
  WindowTraffic* window_traffic() { return window_traffic_.get(); }  // null: all ranks are on this node

  // Waits at most `limit` for the collectives, then at most as long for the messages; whether nothing runs any more.
  bool wait_until_idle(std::chrono::milliseconds limit);
  // Gives running operations `patience` to end, leaves the group, fails what is left and leaves the engine. Joins
  // threads that may run Python: the GIL must not be held. Only the first call does anything.
  void close(std::chrono::milliseconds patience);
  // Of a group that has failed: closes it without a wait for callbacks, and lets go of its memory, connections and
  // descriptors (Note [Use] in group_context.h).
  void abort();
  bool is_closed() const { return is_closed_; }
  bool was_shut_down() const { return is_closed_ && !is_aborted_; }
  // Closes what is open in this process, for the interpreter's exit.
  static void close_all(std::chrono::milliseconds patience);
  static bool are_all_idle();  // of this process

 private:
  static std::vector<std::shared_ptr<GroupRuntime>> all_open();
  GroupRuntime(std::shared_ptr<GroupContext> group, bool may_use_cma);
  std::vector<Channel*> channels();
  void close(std::chrono::milliseconds patience, std::chrono::milliseconds goodbye, bool waits_for_callbacks);

  const std::shared_ptr<GroupContext> group_;  // life shared with the process group, and with segments that check it
  ProgressEngine& engine_;
  const std::shared_ptr<CollectiveQueue> collectives_;   // life shared with its works
  const std::shared_ptr<PointToPoint> messages_;         // life shared with its works
  const std::unique_ptr<WindowTraffic> window_traffic_;  // null: all ranks are on this node
  const std::unique_ptr<Channel> connections_;           // likewise
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_aborted_{false};
};

}  // namespace zeropg

// What runs the operations of one process group, and how that ends.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "backend/engine/collective_channel.h"
#include "backend/engine/engine.h"
#include "backend/engine/network_channel.h"
#include "backend/group/group.h"
#include "backend/p2p/point_to_point.h"
#include "backend/platform/process/callback_threads.h"

namespace zeropg {

// The group, its channels on the engine, and the threads for its futures' callbacks.
class GroupChannels final : public OperationHost {
 public:
  // Joins the engine. The result must be closed before its last owner lets it go; works that outlive their process
  // group are owners too. DistBackendError, here and on the peers, when the engine cannot start its thread.
  static std::shared_ptr<GroupChannels> open(std::shared_ptr<Group> group, bool may_use_cma);
  GroupChannels(const GroupChannels&) = delete;
  GroupChannels& operator=(const GroupChannels&) = delete;

  Group& group() { return *group_; }
  const std::shared_ptr<Group>& shared_group() { return group_; }
  Engine& engine() { return engine_; }
  CollectiveChannel& collectives() { return collectives_; }
  PointToPoint& messages() { return messages_; }

  // The one place where a thread enters a channel in order to wait: it keeps forked children out.
  void help(const ZeroWork& work, std::chrono::steady_clock::time_point until) override;
  std::string who_is_late() override { return group_->who_is_late(); }
  CallbackThreads& callback_threads() override { return *callbacks_; }

  // Waits at most `limit` for the collectives, then at most as long for the messages; whether nothing runs any more.
  bool wait_until_idle(std::chrono::milliseconds limit);
  // Gives running operations `patience` to end, leaves the group, fails what is left and leaves the engine. Joins
  // threads that may run Python: the GIL must not be held. Only the first call does anything.
  void close(std::chrono::milliseconds patience);
  // Of a group that has failed: closes it without a wait for callbacks, and lets go of its memory, connections and
  // descriptors (Note [Use] in group.h).
  void abort();
  bool is_closed() const { return is_closed_; }
  bool was_shut_down() const { return is_closed_ && !is_aborted_; }
  // Closes what is open in this process, for the interpreter's exit.
  static void close_all(std::chrono::milliseconds patience);
  static bool are_all_idle();  // of this process

 private:
  static std::vector<std::shared_ptr<GroupChannels>> all_open();
  GroupChannels(std::shared_ptr<Group> group, bool may_use_cma);
  void close(std::chrono::milliseconds patience, std::chrono::milliseconds goodbye, bool waits_for_callbacks);

  const std::shared_ptr<Group> group_;  // life shared with the process group, and with segments that check it
  Engine& engine_;
  CollectiveChannel collectives_;
  PointToPoint messages_;
  NetworkChannel network_;
  std::shared_ptr<CallbackThreads> callbacks_;  // life shared with the engine and the works
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_aborted_{false};
};

}  // namespace zeropg

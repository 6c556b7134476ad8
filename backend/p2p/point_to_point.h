// Messages between two ranks of a group, matched by tag.
//
// Note [Messages]
// A message is a header and its bytes in the stream of its ordered pair of ranks, so messages of one pair arrive in
// order. A receive takes the earliest message of its peer (or of anybody) with its tag. A message that no posted
// receive wants, while another receive waits behind it in the stream, is set aside in memory; without a waiting receive
// it stays in the ring and its sender waits. So sends and receives may be posted in any order on both sides without a
// deadlock.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/diagnostics/pause_detector.h"
#include "backend/diagnostics/wait_timer.h"
#include "backend/engine/progress_engine.h"
#include "backend/engine/queue_of_group.h"
#include "backend/engine/work.h"
#include "backend/group/group_context.h"
#include "backend/p2p/message_receiver.h"
#include "backend/p2p/message_sender.h"
#include "backend/p2p/p2p_message.h"
#include "backend/p2p/posted_receives.h"

namespace zeropg {

class PointToPoint final : public QueueOfGroup, public Channel {
 public:
  // `may_use_cma`: large messages are read from the sender's memory where that works (Note [Offers]).
  PointToPoint(std::shared_ptr<GroupContext> group, ProgressEngine& engine, bool may_use_cma);

  // What can be moved at once, and is little, is moved in the calling thread; the rest by a thread that waits, or the
  // progress thread.
  void post(P2pMessage message);

  // See OperationHost.
  void help(const ZeroWork& work, std::chrono::steady_clock::time_point until) override;
  std::string who_is_late() override { return ""; }  // a message's label names its peer

  bool is_waited_for() const { return helpers_.load() > 0; }  // by a thread that moves the messages
  bool is_left_to_engine() const;                             // the progress thread has to move them

  bool wait_until_idle(std::chrono::milliseconds limit);
  bool is_only_listening() const;  // all that is left are receives for which nothing has come

  // See Channel.
  Activity advance_on_engine_thread() override;
  void check_on_engine_thread() override;
  void set_sleeping(bool is_sleeping) override;
  int32_t local_world_size() const override { return static_cast<int32_t>(group_->topology().own_node().size()); }

 private:
  Activity advance(const ZeroWork* own);
  Activity advance_locked(FinishedMessages& finished);
  bool advance_sends_locked(int32_t peer, FinishedMessages& finished);
  int64_t wanted_bytes() const;
  bool serve_from_set_aside(const PostedMessage& posted);
  bool has_pending() const;
  const PostedMessage* waiting_for_locked(int32_t peer) const;
  [[noreturn]] void blame_locked(int32_t peer, const c10::DistNetworkError& error) const;
  void check(const ZeroWork* own);
  void check_all_locked(const PeerStates& peers);
  std::vector<const PostedMessage*> pending_locked() const;
  void check_locked(const PostedMessage& posted, const PeerStates& peers);
  void fail_locked(const std::exception_ptr& error, FinishedMessages& finished);
  void finish(FinishedMessages finished, const ZeroWork* own);  // `own` has an owner: its caller, or who waits for it
  void leave();

  ProgressEngine& engine_;
  std::atomic<int32_t> helpers_{0};  // threads inside help(): the progress thread leaves the messages to them
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::vector<MessageSender> senders_;      // per peer; guarded by mutex_
  std::vector<MessageReceiver> receivers_;  // per peer; guarded by mutex_
  std::vector<WaitTimer> sends_;            // per peer; guarded by mutex_
  std::vector<WaitTimer> receives_;         // per peer; guarded by mutex_
  PostedReceives posted_;                   // guarded by mutex_
  uint64_t order_ = 0;                      // guarded by mutex_
  size_t ending_ = 0;                       // guarded by mutex_; messages that moved and are not complete yet
  PauseDetector pause_detector_;            // guarded by mutex_
};

}  // namespace zeropg

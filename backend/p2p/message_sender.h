// The messages of this rank to one other rank, in order.
#pragma once

#include <list>
#include <span>
#include <utility>

#include "backend/group/group_context.h"
#include "backend/p2p/message_header.h"
#include "backend/p2p/p2p_message.h"

namespace zeropg {

class MessageSender {
 public:
  // `group` must outlive it. `may_use_cma`: the receiver may read this process's memory (Note [Offers]).
  MessageSender(GroupContext& group, int32_t peer, bool may_use_cma);

  void push(PostedMessage posted) { queue_.push_back(std::move(posted)); }
  // Sends what can be sent now. True: something moved. Throws DistNetworkError when the peer is gone.
  bool advance(FinishedMessages& finished);
  const std::list<PostedMessage>& queue() const { return queue_; }  // the first one is being sent
  std::list<PostedMessage> take_all() { return std::exchange(queue_, {}); }

 private:
  void begin(const P2pMessage& message);
  bool is_answered();
  size_t send(std::span<const std::byte> bytes);

  GroupContext& group_;
  const int32_t peer_;
  bool may_use_cma_;
  std::list<PostedMessage> queue_;
  // Of the first one:
  bool has_begun_ = false;
  MessageStart start_;
  size_t start_sent_ = 0;
  bool is_offered_ = false;  // and not answered
  int64_t sent_ = 0;

  uint64_t offers_ = 0;
};

}  // namespace zeropg

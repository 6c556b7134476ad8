#include "backend/p2p/message_sender.h"

#include <c10/util/Exception.h>

namespace zeropg {

namespace {

constexpr int64_t kSmallestOffer = 256 << 10;  // below it a ring is as fast, and the sender is free earlier

}  // namespace

MessageSender::MessageSender(GroupContext& group, int32_t peer, bool may_use_cma)
    : group_(group), peer_(peer), may_use_cma_(may_use_cma) {}

size_t MessageSender::send(std::span<const std::byte> bytes) {
  return group_.transport_to(peer_).try_send(peer_, Lane::kPointToPoint, bytes);
}

void MessageSender::begin(const P2pMessage& message) {
  start_ = MessageStart{
      .header = {static_cast<uint64_t>(message.bytes), message.route.tag, static_cast<uint16_t>(message.dtype)},
      .offer = {}};
  is_offered_ = false;
  if (message.bytes > kSmallestOffer && group_.topology().is_on_this_node(peer_)) {
    start_.offer.pool_offset = group_.pool()->offset_of(message.data, message.bytes);
    is_offered_ = start_.offer.pool_offset >= 0 || may_use_cma_;
  }
  if (is_offered_) {
    start_.header.magic = MessageHeader::kOfferFollows;
    if (start_.offer.pool_offset < 0) {
      start_.offer.sender = own_cma_identity();
      start_.offer.address = reinterpret_cast<uint64_t>(message.data);
    }
    ++offers_;
  }
  start_sent_ = 0;
  sent_ = 0;
}

bool MessageSender::advance(FinishedMessages& finished) {
  bool has_moved = false;
  while (!queue_.empty()) {
    const P2pMessage& message = queue_.front().message;
    if (!std::exchange(has_begun_, true)) {
      begin(message);  // once: the receiver counts offers too
    }
    if (start_sent_ < start_.wire_bytes()) {
      const auto whole = std::as_bytes(std::span(&start_, 1)).first(start_.wire_bytes());
      const size_t moved = send(whole.subspan(start_sent_));
      start_sent_ += moved;
      has_moved |= moved > 0;
      if (start_sent_ < start_.wire_bytes()) {
        return has_moved;
      }
    }
    if (is_offered_ && !is_answered()) {
      return has_moved;
    }
    if (sent_ < message.bytes) {
      const size_t moved = send({message.data + sent_, static_cast<size_t>(message.bytes - sent_)});
      sent_ += static_cast<int64_t>(moved);
      has_moved |= moved > 0;
      if (sent_ < message.bytes) {
        return has_moved;
      }
    }
    has_moved = true;
    finished.emplace_back(std::move(queue_.front()), nullptr);
    queue_.pop_front();
    has_begun_ = false;
  }
  return has_moved;
}

// True once the receiver has the bytes, or wants them sent.
bool MessageSender::is_answered() {
  const MailboxCounters& counters = group_.arena().mailbox_counters(
      group_.arena().rank(), group_.topology().local_rank[peer_], static_cast<int32_t>(Lane::kPointToPoint));
  const uint64_t answer = counters.answered.load(std::memory_order_acquire);
  if (answer == answer_to(offers_, Answer::kHaveIt)) {
    sent_ = queue_.front().message.bytes;
  } else if (answer == answer_to(offers_, Answer::kSendAll)) {
    may_use_cma_ = false;
  } else if (answer != answer_to(offers_, Answer::kSendIt)) {
    TORCH_CHECK_WITH(DistNetworkError, answer < answer_to(offers_, Answer::kHaveIt), "rank ", peer_,
                     " answered an offer that nobody made; the shared memory of the group was overwritten.");
    return false;
  }
  is_offered_ = false;
  return true;
}

}  // namespace zeropg

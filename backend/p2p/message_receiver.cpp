#include "backend/p2p/message_receiver.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>
#include <utility>

#include "backend/platform/cpu/copy.h"
#include "backend/transport/shm/cma_peers.h"

namespace zeropg {

namespace {

constexpr size_t kLargestGrowthBytes = size_t{1} << 20;
constexpr size_t kLargestReadBytes = size_t{8} << 20;  // about a millisecond, then other operations get their turn

}  // namespace

bool MessageReceiver::advance(PostedReceives& posted, FinishedMessages& finished, uint64_t& order) {
  bool has_moved = false;
  // A message that has begun to move is finished; a new one is looked at only for a receive that waits.
  while (target_ || is_setting_aside_ || posted.wants_from(peer_)) {
    if (!target_ && !is_setting_aside_) {
      if (!receive_start(posted, has_moved)) {
        return has_moved;
      }
      begin(posted, order);
    }
    const uint64_t before = received_;
    target_ ? receive_target() : receive_set_aside();
    has_moved |= received_ != before;
    if (received_ < start_.header.bytes) {
      return has_moved;
    }
    if (is_offered_) {
      end_offer();
      if (received_ < start_.header.bytes) {
        return true;  // it was refused at the last moment, and comes as bytes
      }
    }
    has_moved = true;
    if (!target_) {
      is_setting_aside_ = false;
      return true;
    }
    if (const auto path = std::exchange(timed_path_, std::nullopt)) {
      choice_.note(*path, start_.header.bytes, std::chrono::duration<double>(Clock::now() - timed_from_).count());
    }
    target_->message.work->set_source_rank(peer_);
    finished.emplace_back(std::move(*target_), nullptr);
    target_.reset();
  }
  return has_moved;
}

// True when the start of the next message is whole; it may come in pieces.
bool MessageReceiver::receive_start(const PostedReceives& posted, bool& has_moved) {
  const std::span<std::byte> whole = std::as_writable_bytes(std::span(&start_, 1));
  if (start_received_ == 0) {
    start_ = MessageStart();
  }
  // What follows the header is known once the header is.
  for (const size_t needed : {sizeof(MessageHeader), sizeof(MessageStart)}) {
    if (start_received_ >= sizeof(MessageHeader) && start_.wire_bytes() < needed) {
      break;
    }
    if (start_received_ >= needed) {
      continue;
    }
    size_t moved = 0;
    try {
      moved = group_.transport_to(peer_).try_receive(peer_, Lane::kPointToPoint,
                                                     whole.first(needed).subspan(start_received_));
    } catch (const c10::DistNetworkError&) {
      // A receive from anybody goes on without this peer; the channel's check knows when nobody is left.
      if (start_received_ > 0 || posted.names(peer_)) {
        throw;
      }
      return false;
    }
    has_moved |= moved > 0;
    start_received_ += moved;
    if (start_received_ < needed) {
      return false;
    }
    const uint16_t magic = start_.header.magic;
    TORCH_CHECK_WITH(DistNetworkError,
                     magic == MessageHeader::kBytesFollow ||
                         (magic == MessageHeader::kOfferFollows && group_.topology().is_on_this_node(peer_)),
                     "rank ", peer_, " sent a message that is none; the shared memory of the group was overwritten.");
  }
  start_received_ = 0;
  return true;
}

void MessageReceiver::begin(PostedReceives& posted, uint64_t& order) {
  const MessageHeader& header = start_.header;
  received_ = 0;
  is_offered_ = header.magic == MessageHeader::kOfferFollows;
  target_ = posted.take(peer_, header.tag);
  if (target_) {
    check_fits(target_->message, peer_, header.bytes, header.dtype);
  } else {
    is_setting_aside_ = true;
    set_aside_.push_back(SetAside{header.tag, header.dtype, header.bytes, ++order, {}});
  }
  if (is_offered_) {
    take_offer();
  }
}

void MessageReceiver::receive_target() {
  const P2pMessage& message = target_->message;
  if (const uint64_t bytes = start_.header.bytes; received_ < bytes) {
    received_ += receive({message.data + received_, static_cast<size_t>(bytes - received_)});
  }
}

void MessageReceiver::receive_set_aside() {
  if (start_.header.bytes == 0) {
    return;
  }
  std::vector<std::byte>& data = set_aside_.back().data;
  const auto growth =
      std::min<uint64_t>(is_offered_ ? kLargestReadBytes : kLargestGrowthBytes, start_.header.bytes - received_);
  try {
    data.resize(static_cast<size_t>(received_ + growth));
  } catch (const std::bad_alloc&) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("this rank has no memory left for a message of ", start_.header.bytes, " bytes from rank ", peer_,
                 " with tag ", set_aside_.back().tag,
                 ", which it has not asked for yet; receive in the order in which that rank sends, or let it"
                 " send later."));
  }
  received_ += receive(std::span(data).subspan(static_cast<size_t>(received_)));
  data.resize(static_cast<size_t>(received_));
}

size_t MessageReceiver::receive(std::span<std::byte> into) {
  if (!is_offered_) {
    return group_.transport_to(peer_).try_receive(peer_, Lane::kPointToPoint, into);
  }
  const std::span<std::byte> piece = into.first(std::min(into.size(), kLargestReadBytes));
  if (pooled_ != nullptr) {
    const bool is_streaming = start_.header.bytes >= static_cast<uint64_t>(kStreamingBytes);
    copy_bytes(piece.data(), pooled_ + received_, static_cast<int64_t>(piece.size()), is_streaming);
    return piece.size();
  }
  if (reader_->read(start_.offer.address + received_, piece)) {
    return piece.size();
  }
  answer(Answer::kSendAll);  // a sender that died sends nothing either, which the channel's check finds out
  return 0;
}

void MessageReceiver::take_offer() {
  ++offers_;
  pooled_ = nullptr;
  if (const int64_t offset = start_.offer.pool_offset; offset >= 0) {
    pooled_ = group_.pool()->at(group_.topology().local_rank[peer_], offset, static_cast<int64_t>(start_.header.bytes));
    TORCH_CHECK_WITH(DistNetworkError, pooled_ != nullptr, "rank ", peer_, " sends ", start_.header.bytes,
                     " bytes from ", offset,
                     " of its part of the tensor pool, which has fewer; the shared memory of the"
                     " group was overwritten.");
  } else {
    try_cma();
  }
}

void MessageReceiver::try_cma() {
  const CmaIdentity& sender = start_.offer.sender;
  if (may_use_cma_ && !(reader_ && reader_->peer() == sender)) {
    reader_.emplace(sender);
    if (!reader_->is_usable()) {
      say_unreadable(group_.rank(), group_.world_size(), peer_, reader_->refusal());
    }
  }
  if (!may_use_cma_ || !reader_->is_usable()) {
    answer(Answer::kSendAll);
  } else if (target_) {
    timed_path_ = choice_.next(start_.header.bytes);
    timed_from_ = Clock::now();
    if (*timed_path_ == Path::kReceive) {
      answer(Answer::kSendIt);
    }
  }
}

// The bytes are believed only when the process that was read is still the one that was tried, and had not given up: a
// sender that failed may have let go of its tensor while it was read.
void MessageReceiver::end_offer() {
  const RankState state = group_.arena().state_of(group_.topology().local_rank[peer_]);
  const bool is_sound = pooled_ != nullptr || reader_->confirm();
  answer(is_sound && state == RankState::kAlive ? Answer::kHaveIt : Answer::kSendAll);
}

void MessageReceiver::answer(Answer answer) {
  is_offered_ = false;
  if (answer != Answer::kHaveIt) {  // all of it comes again
    received_ = 0;
    if (is_setting_aside_) {
      set_aside_.back().data.clear();
    }
  }
  const int32_t sender = group_.topology().local_rank[peer_];
  group_.arena()
      .mailbox_counters(sender, group_.arena().rank(), static_cast<int32_t>(Lane::kPointToPoint))
      .answered.store(answer_to(offers_, answer), std::memory_order_release);
  group_.arena().ring(sender);
}

}  // namespace zeropg

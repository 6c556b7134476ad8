#include "backend/point_to_point.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/collective_channel.h"

namespace zeropg {

namespace {

constexpr uint32_t kMagic = 0x7a70676d;  // "zpgm": catches a stream that got out of step
constexpr size_t kLargestGrowthBytes = size_t{1} << 20;

}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<Group> group, Engine& engine)
    : group_(std::move(group)),
      engine_(engine),
      outboxes_(static_cast<size_t>(group_->world_size())),
      inboxes_(static_cast<size_t>(group_->world_size())) {}

void PointToPoint::send(Message message) { start(std::move(message), /*is_send=*/true); }
void PointToPoint::receive(Message message) { start(std::move(message), /*is_send=*/false); }

void PointToPoint::start(Message message, bool is_send) {
  group_->release_retired();
  Finished finished;
  bool is_pending = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group_->throw_if_failed();
    const int32_t peer = message.peer;
    const OperationLabel label = message.work->label();
    Posted posted{std::move(message), ++order_, std::chrono::steady_clock::now()};
    if (is_send) {
      outboxes_[peer].queue.push_back(std::move(posted));
    } else {
      posted_.push_back(std::move(posted));
    }
    try {
      group_->throw_if_peer_failed(label);
      advance_locked(finished);
    } catch (...) {
      fail_locked(std::current_exception(), finished);
    }
    is_pending = has_pending();
  }
  finish(std::move(finished), /*is_engine_thread=*/false);
  if (is_pending) {
    engine_.wake();
  }
}

Activity PointToPoint::advance_on_engine_thread() {
  Finished finished;
  Activity activity = Activity::kIdle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_pending()) {
      return Activity::kIdle;
    }
    try {
      group_->throw_if_failed();
      activity = advance_locked(finished);
    } catch (...) {
      fail_locked(std::current_exception(), finished);
    }
  }
  finish(std::move(finished), /*is_engine_thread=*/true);
  return activity;
}

Activity PointToPoint::advance_locked(Finished& finished) {
  bool has_moved = false;
  for (size_t i = 0; i < posted_.size();) {
    if (take_from_set_aside(posted_[i])) {
      finished.emplace_back(std::move(posted_[i]), nullptr);
      posted_.erase(posted_.begin() + static_cast<std::ptrdiff_t>(i));
      has_moved = true;
    } else {
      ++i;
    }
  }
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    if (peer != group_->rank()) {
      has_moved |= advance_outbox(peer, finished);
      has_moved |= advance_inbox(peer, finished);
    }
  }
  return has_moved ? Activity::kMoved : has_pending() ? Activity::kBlocked : Activity::kIdle;
}

bool PointToPoint::advance_outbox(int32_t peer, Finished& finished) {
  Outbox& outbox = outboxes_[peer];
  bool has_moved = false;
  while (!outbox.queue.empty()) {
    const Message& message = outbox.queue.front().message;
    if (outbox.header_sent == 0) {
      outbox.header = Header{static_cast<uint64_t>(message.bytes), message.tag, kMagic};
    }
    if (outbox.header_sent < sizeof(Header)) {
      const auto header = std::as_bytes(std::span(&outbox.header, 1)).subspan(outbox.header_sent);
      const size_t moved = group_->transport_to(peer).try_send(peer, Lane::kPointToPoint, header);
      outbox.header_sent += moved;
      has_moved |= moved > 0;
      if (outbox.header_sent < sizeof(Header)) {
        return has_moved;
      }
    }
    if (outbox.sent < message.bytes) {
      const std::span<const std::byte> rest(message.data + outbox.sent,
                                            static_cast<size_t>(message.bytes - outbox.sent));
      const size_t moved = group_->transport_to(peer).try_send(peer, Lane::kPointToPoint, rest);
      outbox.sent += static_cast<int64_t>(moved);
      has_moved |= moved > 0;
      if (outbox.sent < message.bytes) {
        return has_moved;
      }
    }
    finished.emplace_back(std::move(outbox.queue.front()), nullptr);
    outbox.queue.pop_front();
    outbox.header_sent = 0;
    outbox.sent = 0;
  }
  return has_moved;
}

bool PointToPoint::wants_from(int32_t peer) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const Posted& posted) {
    return posted.message.peer == peer || posted.message.peer == Message::kAnySource;
  });
}

bool PointToPoint::is_named(int32_t peer) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const Posted& posted) { return posted.message.peer == peer; });
}

bool PointToPoint::advance_inbox(int32_t peer, Finished& finished) {
  Inbox& inbox = inboxes_[peer];
  bool has_moved = false;
  // A message that has begun to move is finished; a new one is looked at only for a receive that waits.
  while (inbox.target || inbox.is_setting_aside || wants_from(peer)) {
    if (!inbox.target && !inbox.is_setting_aside) {
      const size_t before = inbox.header_received;
      bool is_whole = false;
      try {
        is_whole = receive_header(peer, inbox);
      } catch (const c10::DistNetworkError&) {
        // A receive from anybody goes on without this peer; check_locked() knows when nobody is left.
        if (inbox.header_received > 0 || is_named(peer)) {
          throw;
        }
        return has_moved;
      }
      has_moved |= inbox.header_received != before;
      if (!is_whole) {
        return has_moved;
      }
      inbox.received = 0;
      inbox.target = take_posted(peer, inbox.header.tag);
      if (!inbox.target) {
        inbox.is_setting_aside = true;
        inbox.set_aside.push_back(SetAside{inbox.header.tag, inbox.header.bytes, ++order_, {}});
      } else if (static_cast<uint64_t>(inbox.target->message.bytes) != inbox.header.bytes) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str(inbox.target->message.work->label().prefix(), ": rank ", peer, " sent ",
                                 inbox.header.bytes, " bytes with tag ", inbox.header.tag, ", this rank receives ",
                                 inbox.target->message.bytes, "; make both tensors the same size."));
      }
    }
    const int64_t before = inbox.received;
    const bool is_complete = receive_body(peer, inbox, finished);
    has_moved |= is_complete || inbox.received != before;
    if (!is_complete) {
      return has_moved;
    }
  }
  return has_moved;
}

// True when the header of the next message is whole; it may have come in pieces.
bool PointToPoint::receive_header(int32_t peer, Inbox& inbox) {
  const std::span<std::byte> rest = std::span(inbox.header_bytes).subspan(inbox.header_received);
  inbox.header_received += group_->transport_to(peer).try_receive(peer, Lane::kPointToPoint, rest);
  if (inbox.header_received < sizeof(Header)) {
    return false;
  }
  std::memcpy(&inbox.header, inbox.header_bytes.data(), sizeof(Header));
  TORCH_CHECK_WITH(DistNetworkError, inbox.header.magic == kMagic, "rank ", peer,
                   " sent a message that is none; the shared memory of the group was overwritten.");
  inbox.header_received = 0;
  return true;
}

// True when the message is complete.
bool PointToPoint::receive_body(int32_t peer, Inbox& inbox, Finished& finished) {
  if (inbox.target) {
    const Message& message = inbox.target->message;
    if (inbox.received < message.bytes) {
      const std::span<std::byte> rest(message.data + inbox.received,
                                      static_cast<size_t>(message.bytes - inbox.received));
      inbox.received += static_cast<int64_t>(group_->transport_to(peer).try_receive(peer, Lane::kPointToPoint, rest));
    }
    if (inbox.received < message.bytes) {
      return false;
    }
    message.work->set_source_rank(peer);
    finished.emplace_back(std::move(*inbox.target), nullptr);
    inbox.target.reset();
    return true;
  }
  SetAside& message = inbox.set_aside.back();
  while (message.data.size() < message.bytes) {
    const size_t filled = message.data.size();
    const size_t growth = std::min<size_t>(kLargestGrowthBytes, message.bytes - filled);
    message.data.resize(filled + growth);
    const size_t moved =
        group_->transport_to(peer).try_receive(peer, Lane::kPointToPoint, std::span(message.data).subspan(filled));
    message.data.resize(filled + moved);
    inbox.received += static_cast<int64_t>(moved);
    if (moved == 0) {
      return false;
    }
  }
  inbox.is_setting_aside = false;
  for (size_t i = 0; i < posted_.size(); ++i) {  // a receive that was posted while the message came in
    if (take_from_set_aside(posted_[i])) {
      finished.emplace_back(std::move(posted_[i]), nullptr);
      posted_.erase(posted_.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
  return true;
}

std::unique_ptr<PointToPoint::Posted> PointToPoint::take_posted(int32_t peer, int32_t tag) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    const Message& message = it->message;
    if (message.tag == tag && (message.peer == peer || message.peer == Message::kAnySource)) {
      auto taken = std::make_unique<Posted>(std::move(*it));
      posted_.erase(it);
      return taken;
    }
  }
  return nullptr;
}

// Serves a receive from the messages that were set aside, if the earliest one with its tag is there in full.
bool PointToPoint::take_from_set_aside(Posted& posted) {
  const Message& message = posted.message;
  Inbox* inbox = nullptr;
  std::deque<SetAside>::iterator found;
  int32_t source = -1;
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    if (message.peer != peer && message.peer != Message::kAnySource) {
      continue;
    }
    auto& candidates = inboxes_[peer].set_aside;
    auto it = std::find_if(candidates.begin(), candidates.end(),
                           [&](const SetAside& candidate) { return candidate.tag == message.tag; });
    if (it != candidates.end() && (inbox == nullptr || it->order < found->order)) {
      inbox = &inboxes_[peer];
      found = it;
      source = peer;
    }
  }
  if (inbox == nullptr || found->data.size() < found->bytes) {
    return false;
  }
  TORCH_CHECK_WITH(DistBackendError, found->bytes == static_cast<uint64_t>(message.bytes),
                   message.work->label().prefix(), ": rank ", source, " sent ", found->bytes, " bytes with tag ",
                   message.tag, ", this rank receives ", message.bytes, "; make both tensors the same size.");
  if (message.bytes > 0) {
    std::memcpy(message.data, found->data.data(), found->data.size());
  }
  message.work->set_source_rank(source);
  inbox->set_aside.erase(found);
  return true;
}

bool PointToPoint::has_pending() const {
  return !posted_.empty() ||
         std::any_of(outboxes_.begin(), outboxes_.end(), [](const Outbox& outbox) { return !outbox.queue.empty(); }) ||
         std::any_of(inboxes_.begin(), inboxes_.end(), [](const Inbox& inbox) { return inbox.target != nullptr; });
}

void PointToPoint::fail_locked(const std::exception_ptr& error, Finished& finished) {
  for (Posted& posted : posted_) {
    finished.emplace_back(std::move(posted), error);
  }
  posted_.clear();
  for (Outbox& outbox : outboxes_) {
    for (Posted& posted : outbox.queue) {
      finished.emplace_back(std::move(posted), error);
    }
    outbox.queue.clear();
  }
  for (Inbox& inbox : inboxes_) {
    if (inbox.target) {
      finished.emplace_back(std::move(*inbox.target), error);
      inbox.target.reset();
    }
  }
}

void PointToPoint::check_on_engine_thread() {
  Finished finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_pending()) {
      return;
    }
    const PeerStates peers = group_->peer_states();
    try {
      group_->throw_if_failed();
      advance_locked(finished);  // what a peer sent before it left still counts
      for (const Posted& posted : posted_) {
        std::vector<int32_t> awaited{posted.message.peer};
        if (posted.message.peer == Message::kAnySource) {
          awaited.resize(static_cast<size_t>(group_->world_size()));
          std::iota(awaited.begin(), awaited.end(), 0);
        }
        check_locked(posted, peers, awaited);
      }
      for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
        for (const Posted& posted : outboxes_[peer].queue) {
          check_locked(posted, peers, {peer});
        }
        if (inboxes_[peer].target) {
          check_locked(*inboxes_[peer].target, peers, {peer});
        }
      }
    } catch (...) {
      fail_locked(std::current_exception(), finished);
    }
  }
  finish(std::move(finished), /*is_engine_thread=*/true);
}

void PointToPoint::check_locked(const Posted& posted, const PeerStates& peers, const std::vector<int32_t>& awaited) {
  const OperationLabel& label = posted.message.work->label();
  // A receive from anybody goes on as long as anybody is left.
  const bool is_any = posted.message.peer == Message::kAnySource;
  const bool is_alone = peers.departed.size() + peers.dead.size() + 1 == static_cast<size_t>(group_->world_size());
  if (!is_any || peers.failed >= 0 || !peers.dead.empty() || is_alone) {
    throw_if_lost(label, peers, awaited);
  }
  const auto waited = std::chrono::steady_clock::now() - posted.start;
  TORCH_CHECK_WITH(DistBackendError, waited < posted.message.work->timeout(), label.prefix(), ": timed out after ",
                   posted.message.work->timeout().count(), " ms waiting for ",
                   is_any ? std::string("any rank") : list_ranks(awaited), " with tag ", posted.message.tag,
                   group_->silence(), "; see what it does, or raise the timeout of the group.");
}

void PointToPoint::finish(Finished finished, bool is_engine_thread) {
  if (finished.empty()) {
    return;
  }
  for (auto& [posted, error] : finished) {
    c10::intrusive_ptr<ZeroWork> work = std::move(posted.message.work);
    std::exception_ptr described;
    if (error) {
      described = describe_error(*group_, work->label(), error);
      try {
        std::rethrow_exception(described);
      } catch (const c10::Error& known) {
        group_->fail(known.what_without_backtrace());
      }
    } else {
      const auto duration = std::chrono::steady_clock::now() - posted.start;
      group_->count(work->label(), std::chrono::duration<double>(duration).count(), {});
      group_->notify_complete(work->completion_key(), work->elapsed_ms());
    }
    work->complete(described);
    if (is_engine_thread) {
      group_->retire(std::move(work));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_pending()) {
    idle_.notify_all();
  }
}

bool PointToPoint::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [&] { return !has_pending(); });
}

void PointToPoint::set_sleeping(bool is_sleeping) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_sleeping || has_pending()) {
    group_->arena().set_sleeping(is_sleeping);
  }
}

int32_t PointToPoint::local_world_size() const { return static_cast<int32_t>(group_->node().size()); }

}  // namespace zeropg

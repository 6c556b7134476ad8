#include "backend/p2p/point_to_point.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <list>

#include "backend/diagnostics/format_ranks.h"
#include "backend/engine/collective_queue.h"
#include "backend/platform/cpu/waiter.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

constexpr int64_t kInlineBytes = 256 << 10;  // what a call may take of messages before it returns

// Of a message that has moved: also of one from anybody.
int32_t peer_of(const PostedMessage& posted) {
  const P2pMessage& message = posted.message;
  return message.route.is_from_anybody() ? message.work->sourceRank() : message.route.peer;
}

// Of those from `first` on.
void end_waits(FinishedMessages& finished, size_t first, std::vector<WaitTimer>& standstills) {
  for (size_t i = first; i < finished.size(); ++i) {
    PostedMessage& posted = finished[i].first;
    posted.waiting_seconds = standstills[static_cast<size_t>(peer_of(posted))].take(posted.start);
  }
}

std::vector<int32_t> awaited_by(const PostedMessage& posted, const Topology& topology) {
  const MessageRoute& route = posted.message.route;
  return route.is_from_anybody() ? topology.others_than(topology.rank) : std::vector<int32_t>{route.peer};
}

// A receive that stays posted for a whole run must not be all that this rank asks about.
std::vector<int32_t> awaited_by_all(const std::vector<const PostedMessage*>& pending, const Topology& topology) {
  std::vector<int32_t> awaited;
  for (const PostedMessage* posted : pending) {
    const std::vector<int32_t> more = awaited_by(*posted, topology);
    awaited.insert(awaited.end(), more.begin(), more.end());
  }
  std::sort(awaited.begin(), awaited.end());
  awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
  return awaited;
}

}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<GroupContext> group, ProgressEngine& engine, bool may_use_cma)
    : QueueOfGroup(std::move(group)),
      engine_(engine),
      sends_(static_cast<size_t>(group_->world_size())),
      receives_(static_cast<size_t>(group_->world_size())) {
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    senders_.emplace_back(*group_, peer, may_use_cma);
    receivers_.emplace_back(*group_, peer, may_use_cma);
  }
}

void PointToPoint::post(P2pMessage message) {
  group_->retired_works().release();
  const GroupContext::Use use(*group_);
  const c10::intrusive_ptr<ZeroWork> work = message.work;
  FinishedMessages finished;
  bool is_pending = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group_->throw_if_failed();
    const MessageRoute route = message.route;
    const OperationLabel label = message.work->label();
    PostedMessage posted{std::move(message), ++order_, std::chrono::steady_clock::now()};
    if (route.is_send) {
      senders_[route.peer].push(std::move(posted));
    } else {
      posted_.push(std::move(posted));
    }
    try {
      group_->peers().throw_if_failed(label);
      if (wanted_bytes() <= kInlineBytes) {
        advance_locked(finished);
      } else if (route.is_send) {
        advance_sends_locked(route.peer, finished);
      }
    } catch (...) {
      fail_locked(std::current_exception(), finished);
    }
    is_pending = has_pending();
    ending_ += finished.size();
  }
  finish(std::move(finished), work.get());
  if (is_pending) {
    engine_.wake_soon();
  } else if (group_->network() != nullptr && group_->network()->has_unfinished()) {
    engine_.wake();
  }
}

bool PointToPoint::is_left_to_engine() const {
  if (is_waited_for()) return false;  // before the lock, which who moves messages holds for long
  std::lock_guard<std::mutex> lock(mutex_);
  return has_pending();
}

Activity PointToPoint::advance_on_engine_thread() { return is_waited_for() ? Activity::kIdle : advance(nullptr); }

Activity PointToPoint::advance(const ZeroWork* own) {
  FinishedMessages finished;
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
    ending_ += finished.size();
  }
  finish(std::move(finished), own);
  return activity;
}

void PointToPoint::help(const ZeroWork& work, std::chrono::steady_clock::time_point until) {
  using Clock = std::chrono::steady_clock;
  check_own_process(*group_, work.label());
  GroupContext::Use use(*group_, /*must_succeed=*/false);
  if (!use) {
    return;  // the work has failed, or is just failing
  }
  helpers_.fetch_add(1);
  Waiter waiter(engine_.ranks_on_node(), kCallersPatience);
  auto next_check = Clock::now() + kSignalCheckInterval;
  while (!work.is_complete()) {
    const Activity activity = advance(&work);
    if (work.is_complete()) {
      break;
    }
    if (activity == Activity::kMoved) {
      waiter.reset();
    } else if (!waiter.should_sleep()) {
      waiter.pause();
      group_->cpu_balancer().look(Clock::now());
    } else if (group_->topology().is_one_node()) {
      group_->arena().doze(std::min(until, next_check),
                           [&] { return advance(&work) == Activity::kMoved || work.is_complete(); });
      waiter.reset();
    } else {
      break;  // the progress thread sleeps for this one too: it hears the network
    }
    const auto now = Clock::now();
    if (now >= until) {
      break;
    }
    if (now >= next_check) {
      next_check = now + kSignalCheckInterval;
      check(&work);
      leave();
      use.leave();
      check_signals();  // which may abort the group
      if (!use.enter()) {
        return;
      }
      helpers_.fetch_add(1);
    }
  }
  leave();
}

// The progress thread does what is left.
void PointToPoint::leave() {
  helpers_.fetch_sub(1);
  bool is_pending = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_pending = has_pending();
  }
  if (is_pending || (group_->network() != nullptr && group_->network()->has_unfinished())) {
    engine_.wake();
  }
}

Activity PointToPoint::advance_locked(FinishedMessages& finished) {
  const auto serve = [&](const PostedMessage& posted) { return serve_from_set_aside(posted); };
  size_t first = finished.size();
  bool has_moved = posted_.take_if(serve, finished);
  end_waits(finished, first, receives_);
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    if (peer == group_->rank()) {
      continue;
    }
    const bool has_sent = advance_sends_locked(peer, finished);
    first = finished.size();
    bool has_received = false;
    try {
      has_received = receivers_[peer].advance(posted_, finished, order_);
    } catch (const c10::DistNetworkError& error) {
      blame_locked(peer, error);
    }
    end_waits(finished, first, receives_);
    receives_[peer].look(receivers_[peer].target().has_value() || posted_.wants_from(peer), has_received);
    has_moved |= has_sent || has_received;
  }
  return has_moved ? Activity::kMoved : has_pending() ? Activity::kBlocked : Activity::kIdle;
}

// Never more than a ring, or a window between nodes, takes.
bool PointToPoint::advance_sends_locked(int32_t peer, FinishedMessages& finished) {
  const size_t first = finished.size();
  bool has_sent = false;
  try {
    has_sent = senders_[peer].advance(finished);
  } catch (const c10::DistNetworkError& error) {
    blame_locked(peer, error);
  }
  end_waits(finished, first, sends_);
  sends_[peer].look(!senders_[peer].queue().empty(), has_sent);
  return has_sent;
}

// A message that the stream from or to `peer` holds up: one that names it, or else one from anybody.
const PostedMessage* PointToPoint::waiting_for_locked(int32_t peer) const {
  if (!senders_[peer].queue().empty()) {
    return &senders_[peer].queue().front();
  }
  if (receivers_[peer].target()) {
    return &*receivers_[peer].target();
  }
  for (const bool is_from_anybody : {false, true}) {
    const auto found = std::find_if(posted_.queue().begin(), posted_.queue().end(), [&](const PostedMessage& posted) {
      return is_from_anybody ? posted.message.route.peer < 0 : posted.message.route.peer == peer;
    });
    if (found != posted_.queue().end()) {
      return &*found;
    }
  }
  return nullptr;
}

// Others may have left the group before, with good reason: the error is about this peer.
void PointToPoint::blame_locked(int32_t peer, const c10::DistNetworkError& error) const {
  const PostedMessage* waiting = waiting_for_locked(peer);
  TORCH_INTERNAL_ASSERT(waiting != nullptr, error.what_without_backtrace());
  const OperationLabel& label = waiting->message.work->label();
  throw_if_lost(label, group_->peers().states(), {peer});
  fail_operation(label, error.what_without_backtrace());
}

// Of the receives that have been posted and have not ended.
int64_t PointToPoint::wanted_bytes() const {
  int64_t bytes = 0;
  for (const PostedMessage& posted : posted_.queue()) {
    bytes += posted.message.bytes;
  }
  for (const MessageReceiver& receiver : receivers_) {
    bytes += receiver.target() ? receiver.target()->message.bytes : 0;
  }
  return bytes;
}

// Serves a receive from the messages that were set aside, if the earliest one with its tag is there in full.
bool PointToPoint::serve_from_set_aside(const PostedMessage& posted) {
  const P2pMessage& message = posted.message;
  std::list<SetAside>* messages = nullptr;
  std::list<SetAside>::iterator found;
  int32_t source = -1;
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    if (message.route.peer != peer && !message.route.is_from_anybody()) {
      continue;
    }
    auto& candidates = receivers_[peer].set_aside();
    auto it = std::find_if(candidates.begin(), candidates.end(),
                           [&](const SetAside& candidate) { return candidate.tag == message.route.tag; });
    // One that is still coming in holds up nobody else's: what those send next would overtake what is here of them.
    if (it != candidates.end() && it->is_whole() && (messages == nullptr || it->order < found->order)) {
      messages = &candidates;
      found = it;
      source = peer;
    }
  }
  if (messages == nullptr) {
    return false;
  }
  check_fits(message, source, found->bytes, found->dtype);
  if (message.bytes > 0) {
    std::memcpy(message.data, found->data.data(), found->data.size());
  }
  message.work->set_source_rank(source);
  messages->erase(found);
  return true;
}

bool PointToPoint::has_pending() const {
  return !posted_.queue().empty() ||
         std::any_of(senders_.begin(), senders_.end(), [](const auto& sender) { return !sender.queue().empty(); }) ||
         std::any_of(receivers_.begin(), receivers_.end(),
                     [](const auto& receiver) { return receiver.target().has_value(); });
}

void PointToPoint::fail_locked(const std::exception_ptr& error, FinishedMessages& finished) {
  for (PostedMessage& posted : posted_.take_all()) {
    finished.emplace_back(std::move(posted), error);
  }
  for (MessageSender& sender : senders_) {
    for (PostedMessage& posted : sender.take_all()) {
      finished.emplace_back(std::move(posted), error);
    }
  }
  for (MessageReceiver& receiver : receivers_) {
    if (auto target = receiver.take_target()) {
      finished.emplace_back(std::move(*target), error);
    }
  }
}

void PointToPoint::check_on_engine_thread() {
  if (!is_waited_for()) {
    check(nullptr);
  }
}

void PointToPoint::check(const ZeroWork* own) {
  FinishedMessages finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_pending()) {
      return;
    }
    try {
      const PeerStates peers = group_->peers().states();
      group_->throw_if_failed();
      // What a peer sent before it left still counts; while some of that moves there may be more.
      const bool has_moved = advance_locked(finished) == Activity::kMoved;
      check_all_locked(has_moved ? PeerStates{} : peers);
    } catch (...) {
      fail_locked(std::current_exception(), finished);
    }
    ending_ += finished.size();
  }
  finish(std::move(finished), own);
}

void PointToPoint::check_all_locked(const PeerStates& peers) {
  const std::vector<const PostedMessage*> pending = pending_locked();
  if (pending.empty()) {
    return;
  }
  const PostedMessage& oldest =
      **std::ranges::min_element(pending, {}, [](const auto* posted) { return posted->order; });
  const MessageRoute& route = oldest.message.route;
  group_->peers().note_wait(Lane::kPointToPoint, route.is_from_anybody() ? Peers::kAnybody : route.peer,
                            awaited_by(oldest, group_->topology()), {}, awaited_by_all(pending, group_->topology()));
  for (const PostedMessage* posted : pending) {
    check_locked(*posted, peers);
  }
}

std::vector<const PostedMessage*> PointToPoint::pending_locked() const {
  std::vector<const PostedMessage*> pending;
  for (const PostedMessage& posted : posted_.queue()) {
    pending.push_back(&posted);
  }
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    for (const PostedMessage& posted : senders_[peer].queue()) {
      pending.push_back(&posted);
    }
    if (receivers_[peer].target()) {
      pending.push_back(&*receivers_[peer].target());
    }
  }
  return pending;
}

void PointToPoint::check_locked(const PostedMessage& posted, const PeerStates& peers) {
  const OperationLabel& label = posted.message.work->label();
  std::vector<int32_t> awaited = awaited_by(posted, group_->topology());
  // A receive from anybody goes on as long as anybody is left.
  const bool is_any = posted.message.route.is_from_anybody();
  const bool is_alone = peers.departed.size() + peers.dead.size() + 1 == static_cast<size_t>(group_->world_size());
  if (!is_any || peers.failed >= 0 || !peers.dead.empty() || is_alone) {
    throw_if_lost(label, peers, awaited);
  }
  const auto now = std::chrono::steady_clock::now();
  if (!pause_detector_.may_blame(now, posted.start) || now - posted.start < posted.message.work->timeout()) {
    return;
  }
  for (const int32_t peer : peers.departed) {
    std::erase(awaited, peer);
  }
  const WaitCulprits found = group_->peers().culprits_of(Lane::kPointToPoint, awaited);
  throw OperationError({__func__, __FILE__, __LINE__},
                       {.kind = FailureKind::kTimeout,
                        .text = c10::str(label.prefix(), ": timed out after ", posted.message.work->timeout().count(),
                                         " ms waiting for ", awaited.size() > 1 ? "any of " : "", format_ranks(awaited),
                                         found.chain, group_->peers().silence(), "; ",
                                         advise_to_look_at(found.culprits), ", or raise the timeout of the group.")});
}

void PointToPoint::finish(FinishedMessages finished, const ZeroWork* own) {
  if (finished.empty()) {
    return;
  }
  for (auto& [posted, error] : finished) {
    const int32_t peer = peer_of(posted);
    c10::intrusive_ptr<ZeroWork> work = std::move(posted.message.work);
    std::exception_ptr described;
    if (error) {
      described = describe_error(*group_, work->label(), error);
      group_->fail(failure_of(described));
    } else {
      const auto duration = std::chrono::steady_clock::now() - posted.start;
      group_->statistics().count(work->label(), std::chrono::duration<double>(duration).count(), {});
      if (posted.waiting_seconds > 0) {
        group_->statistics().count_waiting(work->label(), peer, posted.waiting_seconds);
      }
      group_->notify_complete(work->completion_key(), work->elapsed_ms());
    }
    end_work(std::move(work), described, own);
  }
  // Who waits for one of these in another thread may have looked for messages, and for the work, just before, and be
  // about to sleep: no peer has anything left to wake it for.
  group_->arena().ring(group_->arena().rank());
  std::lock_guard<std::mutex> lock(mutex_);
  ending_ -= finished.size();
  if (ending_ == 0 && !has_pending()) {
    idle_.notify_all();
  }
}

bool PointToPoint::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [&] { return ending_ == 0 && !has_pending(); });
}

bool PointToPoint::is_only_listening() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ending_ == 0 && std::ranges::all_of(senders_, [](const auto& sender) { return sender.queue().empty(); }) &&
         std::ranges::none_of(receivers_, [](const auto& receiver) { return receiver.target().has_value(); });
}

void PointToPoint::set_sleeping(bool is_sleeping) {
  if (!is_sleeping || is_left_to_engine()) {
    group_->arena().set_sleeping(is_sleeping);
  }
}

}  // namespace zeropg

#include "backend/windows/window_traffic.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "backend/platform/cpu/waiter.h"
#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kNap{50};
constexpr std::chrono::milliseconds kCheckInterval{20};
constexpr size_t kDroppedAtOnce = 64 << 10;
constexpr size_t kMostAtOnce = 8 << 20;   // about a millisecond, then other peers and groups get their turn
constexpr int kMostMessagesAtOnce = 256;  // likewise

OperationLabel label_of(const GroupContext& group, const char* title) {
  return {.rank = group.rank(), .world_size = group.world_size(), .title = title};
}

}  // namespace

WindowTraffic::WindowTraffic(std::shared_ptr<GroupContext> group, ProgressEngine& engine)
    : group_(std::move(group)),
      engine_(engine),
      outgoing_(static_cast<size_t>(group_->world_size())),
      incoming_(static_cast<size_t>(group_->world_size())) {}

uint64_t WindowTraffic::open(Target target) {
  const std::lock_guard lock(mutex_);
  std::erase_if(targets_, [](const auto& known) { return known.second.memory.expired(); });
  targets_[opened_] = std::move(target);
  is_used_ = true;
  return opened_++;
}

void WindowTraffic::close(uint64_t window) {
  const std::lock_guard lock(mutex_);
  targets_.erase(window);
}

void WindowTraffic::put(const Address& to, int64_t offset, std::span<const std::byte> data,
                        std::chrono::milliseconds timeout) {
  send(to, {.magic = Header::kPut, .window = to.window, .offset = offset, .bytes = static_cast<int64_t>(data.size())},
       data, timeout);
}

void WindowTraffic::signal(const Address& to, std::chrono::milliseconds timeout) {
  send(to, {.magic = Header::kSignal, .window = to.window}, {}, timeout);
}

// A handler of a signal may itself put: to this peer it cannot while a message of its own thread is on its way.
class WindowTraffic::Turn {
 public:
  template <typename Check>
  Turn(Outgoing& outgoing, const OperationLabel& label, const Check& check) : outgoing_(outgoing) {
    if (outgoing.holder.load() == std::this_thread::get_id()) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(label.prefix(),
                               ": this thread already puts to that rank, and was interrupted; signal or"
                               " put from a signal handler to other ranks only."));
    }
    while (!outgoing.mutex.try_lock_for(kCheckInterval)) check();
    outgoing.holder = std::this_thread::get_id();
  }
  ~Turn() {
    outgoing_.holder = std::thread::id();
    outgoing_.mutex.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Outgoing& outgoing_;
};

// Whether the group goes on, and with it the peer. Also lets the user interrupt.
void WindowTraffic::check(const OperationLabel& label, int32_t peer) {
  check_signals();
  group_->throw_if_failed();
  group_->network()->ask_for_life({peer});
  throw_if_lost(label, group_->peers().states(), {peer});
}

void WindowTraffic::send(const Address& to, const Header& header, std::span<const std::byte> data,
                         std::chrono::milliseconds timeout) {
  const OperationLabel label = label_of(*group_, header.magic == Header::kPut ? "zeropg:put" : "zeropg:signal");
  check_own_process(*group_, label);
  const WaitingThread thread;
  const GroupContext::Use use(*group_);
  Outgoing& outgoing = outgoing_[static_cast<size_t>(to.peer)];
  const Turn turn(outgoing, label, [&] { check(label, to.peer); });
  bool has_begun = false;
  try {
    auto last_move = Clock::now();
    auto next_check = last_move;
    Waiter waiter(engine_.ranks_on_node(), kCallersPatience);
    for (std::span<const std::byte> part : {std::as_bytes(std::span(&header, 1)), data}) {
      while (!part.empty()) {
        const auto now = Clock::now();
        if (now >= next_check) {
          next_check = now + kCheckInterval;
          check(label, to.peer);
          if (now - last_move >= timeout) {
            throw OperationError(
                {__func__, __FILE__, __LINE__},
                {.kind = FailureKind::kTimeout,
                 .text = c10::str(label.prefix(), ": timed out after ", timeout.count(), " ms in which rank ", to.peer,
                                  " took nothing of it; see what it does, or give more time.")});
          }
        }
        const size_t moved = group_->network()->try_send(to.peer, Lane::kOneSided, part);
        if (moved > 0) {
          has_begun = true;
          part = part.subspan(moved);
          last_move = now;
          waiter.reset();
        } else if (waiter.should_sleep()) {
          std::this_thread::sleep_for(kNap);
        } else {
          waiter.pause();
        }
      }
    }
  } catch (const c10::DistNetworkError& error) {
    group_->throw_if_failed();
    throw_if_lost(label, group_->peers().states(), {to.peer});
    fail_operation(label, error.what_without_backtrace());
  } catch (const OperationError& error) {
    fail_if_open(to.peer, has_begun, error.failure());
    throw;
  } catch (...) {
    fail_if_open(to.peer, has_begun, {.text = c10::str(label.prefix(), ": it was interrupted in the middle.")});
    throw;
  }
  ++outgoing.sent;
  if (group_->network()->has_unfinished()) engine_.wake();
}

// A peer that is still there would take what comes next for the rest of a message that has begun.
void WindowTraffic::fail_if_open(int32_t peer, bool has_begun, const Failure& failure) {
  if (has_begun && !group_->network()->liveness().is_gone(peer)) group_->fail(failure);
}

std::vector<int64_t> WindowTraffic::sent() const {
  std::vector<int64_t> sent;
  for (const Outgoing& outgoing : outgoing_) sent.push_back(outgoing.sent);
  return sent;
}

int64_t WindowTraffic::received(int32_t peer) const {
  return incoming_[static_cast<size_t>(peer)].received.load(std::memory_order_acquire);
}

Activity WindowTraffic::advance_on_engine_thread() {
  if (!is_used_.load(std::memory_order_relaxed) || group_->has_failed()) return Activity::kIdle;
  bool has_moved = false;
  for (const auto& [peer, _] : group_->network()->unread(Lane::kOneSided, 1)) {
    has_moved = true;
    try {
      receive(peer);
    } catch (const c10::DistNetworkError&) {
      // It is gone: whoever waits for it hears of that.
    } catch (const OperationError& error) {
      group_->fail(error.failure());
    }
  }
  return has_moved ? Activity::kMoved : Activity::kIdle;
}

// What has come, in order.
void WindowTraffic::receive(int32_t peer) {
  Incoming& incoming = incoming_[static_cast<size_t>(peer)];
  size_t room = kMostAtOnce;
  for (int messages = 0; messages < kMostMessagesAtOnce; ++messages) {
    const std::span<std::byte> header = std::as_writable_bytes(std::span(&incoming.header, 1));
    if (incoming.header_received < header.size()) {
      incoming.header_received +=
          group_->network()->try_receive(peer, Lane::kOneSided, header.subspan(incoming.header_received));
      if (incoming.header_received < header.size()) return;
      begin(peer, incoming);
    }
    if (incoming.header.magic == Header::kPut && !receive_data(peer, incoming, room)) return;
    incoming.header_received = 0;
    incoming.received.fetch_add(1, std::memory_order_release);
  }
}

void WindowTraffic::begin(int32_t peer, Incoming& incoming) {
  const Header& header = incoming.header;
  const OperationLabel label = label_of(*group_, "zeropg:put");
  if (header.magic != Header::kPut && header.magic != Header::kSignal) {
    fail_operation(label, "rank ", peer, " sent a message to a window that is none.");
  }
  {
    const std::lock_guard lock(mutex_);
    const auto found = targets_.find(header.window);
    incoming.target = found != targets_.end() ? found->second : Target{};
  }
  incoming.data_received = 0;
  const std::shared_ptr<void> memory = incoming.target.memory.lock();
  if (header.magic == Header::kSignal) {
    if (memory != nullptr) incoming.target.signals[peer].fetch_add(1, std::memory_order_release);
    return;
  }
  const bool fits = header.bytes >= 0 && header.offset >= 0 &&
                    (memory == nullptr ||
                     (header.bytes <= incoming.target.bytes && header.offset <= incoming.target.bytes - header.bytes));
  if (!fits) {
    fail_operation(label, "rank ", peer, " puts ", header.bytes, " bytes at ", header.offset, " of a window of ",
                   incoming.target.bytes, ".");
  }
}

// True: all of it is there. `room`: how much more may be taken now.
bool WindowTraffic::receive_data(int32_t peer, Incoming& incoming, size_t& room) {
  const std::shared_ptr<void> memory = incoming.target.memory.lock();
  if (memory == nullptr) dropped_.resize(kDroppedAtOnce);
  while (incoming.data_received < incoming.header.bytes && room > 0) {
    const size_t wanted = std::min(static_cast<size_t>(incoming.header.bytes - incoming.data_received), room);
    const std::span<std::byte> into =
        memory == nullptr ? std::span(dropped_).first(std::min(wanted, kDroppedAtOnce))
                          : std::span(incoming.target.data + incoming.header.offset + incoming.data_received, wanted);
    const size_t moved = group_->network()->try_receive(peer, Lane::kOneSided, into);
    if (moved == 0) return false;
    incoming.data_received += static_cast<int64_t>(moved);
    room -= moved;
  }
  return incoming.data_received == incoming.header.bytes;
}

}  // namespace zeropg

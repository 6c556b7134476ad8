#include "backend/transport/network/remote_transport.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/diagnostics/printable.h"
#include "backend/platform/process/doorbell.h"

namespace zeropg {
namespace {

constexpr uint64_t kHeaderRoom = 64 << 10;  // Note [Stream windows]
constexpr std::chrono::milliseconds kAskInterval{500};
constexpr std::chrono::milliseconds kOwnWaitLife{500};  // Note [Waits]
constexpr std::chrono::milliseconds kWaitLife{1'500};   // of a peer's, which is asked every kAskInterval

std::span<const std::byte> as_bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string_view as_text(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data.get()), payload.bytes};
}

[[noreturn]] void throw_senseless(const char* what) {
  C10_THROW_ERROR(DistNetworkError, c10::str("it sent ", what, ", as no zeropg of this version does"));
}

}  // namespace

RemoteTransport::RemoteTransport(std::unique_ptr<Wire> wire, RemoteTransportOptions options)
    : owner_(::getpid()),
      wire_(std::move(wire)),
      options_(std::move(options)),
      peers_(static_cast<size_t>(options_.world_size)) {
  TORCH_INTERNAL_ASSERT(options_.window_bytes > 0);
  for (const int32_t peer : options_.peers) {
    peers_.at(static_cast<size_t>(peer)).is_member = true;
  }
}

RemoteTransport::~RemoteTransport() {
  if (owner_ == ::getpid()) {
    close(std::chrono::milliseconds(0));
  } else {
    // A forked child that drops its copy: what the wire would say goodbye to are its parent's peers, and a thread that
    // exists only there may have held the lock.
    static_cast<void>(wire_.release());
  }
}

bool RemoteTransport::can_reach(int32_t peer) const {
  return peer >= 0 && peer < options_.world_size && peers_[static_cast<size_t>(peer)].is_member;
}

RemoteTransport::Peer& RemoteTransport::peer_at(int32_t peer) {
  TORCH_INTERNAL_ASSERT(can_reach(peer), wire_->name(), " transport: rank ", options_.rank, " cannot reach rank ",
                        peer);
  return peers_[static_cast<size_t>(peer)];
}

uint64_t RemoteTransport::limit_bytes() const {
  return static_cast<uint64_t>(options_.window_bytes) * 3 / 2 + kHeaderRoom;
}

bool RemoteTransport::is_gone(const Peer& peer) const {
  return is_closed_ || peer.remote.is_lost || peer.remote.state == RankState::kFailed ||
         peer.remote.state == RankState::kDeparted;
}

void RemoteTransport::throw_gone(int32_t peer) const {
  const RemoteState& remote = peers_[static_cast<size_t>(peer)].remote;
  const std::string start = c10::str(wire_->name(), " transport: ");
  if (remote.state == RankState::kFailed) {
    C10_THROW_ERROR(DistNetworkError, c10::str(start, "rank ", peer, " failed: ", remote.failure));
  }
  if (remote.state == RankState::kDeparted) {
    C10_THROW_ERROR(DistNetworkError, c10::str(start, "rank ", peer, " left the group"));
  }
  if (remote.is_lost) {
    C10_THROW_ERROR(DistNetworkError, c10::str(start, "rank ", peer, " is lost: ", remote.loss));
  }
  C10_THROW_ERROR(DistNetworkError, c10::str(start, "closed, so rank ", peer, " cannot be reached"));
}

size_t RemoteTransport::try_send(int32_t peer_rank, Lane lane, std::span<const std::byte> data) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peer_at(peer_rank);
  Outgoing& stream = peer.outgoing[static_cast<size_t>(lane)];
  const uint64_t events_before = events_;
  wanted_ = {FrameKind::kCredit, peer_rank, static_cast<uint8_t>(lane)};
  size_t moved = 0;
  bool has_looked = false;
  while (moved < data.size()) {
    if (is_gone(peer)) throw_gone(peer_rank);
    const uint64_t room = limit_bytes() - (stream.sent - stream.taken);
    const size_t bytes = std::min<uint64_t>({data.size() - moved, room, kMaxPayloadBytes});
    const FrameHeader header{FrameKind::kData, static_cast<uint8_t>(lane), 0, static_cast<uint32_t>(bytes), 0};
    if (bytes > 0 && wire_->send(peer_rank, header, data.subspan(moved, bytes), Urgency::kCanWait)) {
      stream.sent += bytes;
      moved += bytes;
    } else if (has_looked) {
      break;
    } else {
      has_looked = true;  // for credit, or to make room
      read_from(peer_rank);
    }
  }
  if (events_ != events_before) ring_doorbell(process_doorbell());  // see Note [Other people's frames]
  return moved;
}

// Note [Other people's frames]
// Whoever reads from a peer's connection gets whatever comes next on it, also what another thread sleeps for: the
// progress thread, which polls the descriptor, would not notice. So it is woken by its bell.
size_t RemoteTransport::try_receive(int32_t peer_rank, Lane lane, std::span<std::byte> data) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peer_at(peer_rank);
  Incoming& stream = peer.incoming[static_cast<size_t>(lane)];
  const uint64_t events_before = events_;
  size_t moved = take_queued(stream, data);
  if (moved < data.size() && !is_closed_) {
    wanted_ = {FrameKind::kData, peer_rank, static_cast<uint8_t>(lane)};
    read_from(peer_rank);
    moved += take_queued(stream, data.subspan(moved));
  }
  if (moved > 0) tell_taken(peer_rank, static_cast<size_t>(lane));
  if (events_ != events_before) ring_doorbell(process_doorbell());
  // A rank that sent and then left is still heard to the end.
  if (moved == 0 && !data.empty() && is_gone(peer)) throw_gone(peer_rank);
  return moved;
}

bool RemoteTransport::read_from(int32_t peer) {
  const bool has_moved = wire_->progress(peer, *this);
  answer_pings();
  return has_moved;
}

// One answer for however many questions, and only when there is room for it: a peer that asks and does not read must
// not fill our memory.
void RemoteTransport::answer_pings() {
  if (!std::exchange(owes_pongs_, false)) return;
  const Wait collective = own_wait(Lane::kCollective);
  const Wait messages = own_wait(Lane::kPointToPoint);
  std::vector<std::byte> payload;
  const auto append = [&](std::span<const std::byte> bytes) {
    payload.insert(payload.end(), bytes.begin(), bytes.end());
  };
  if (collective.call) append(*collective.call);
  append(std::as_bytes(std::span(collective.awaited)));
  append(std::as_bytes(std::span(messages.awaited)));
  const FrameHeader pong{FrameKind::kPong, static_cast<uint8_t>(collective.call ? 1 : 0), 0,
                         static_cast<uint32_t>(payload.size()), collective.awaited.size()};
  for (const int32_t rank : options_.peers) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.owes_pong || is_gone(peer)) continue;
    peer.owes_pong = !wire_->send(rank, pong, payload, Urgency::kCanWait);
    owes_pongs_ |= peer.owes_pong;
  }
}

RemoteTransport::Wait RemoteTransport::own_wait(Lane lane) const {
  const Wait& wait = waits_[static_cast<size_t>(lane)];
  return Clock::now() - wait.noted <= kOwnWaitLife ? wait : Wait{};
}

void RemoteTransport::note_wait(Lane lane, const std::vector<int32_t>& awaited,
                                const std::optional<WaitingCall>& call) {
  const std::lock_guard lock(mutex_);
  Wait& wait = waits_[static_cast<size_t>(lane)];
  wait.awaited.assign(awaited.begin(), awaited.begin() + std::min(awaited.size(), kMaxNamedWaits));
  wait.call = call;
  wait.noted = Clock::now();
}

std::vector<int32_t> RemoteTransport::waits_of(int32_t peer_rank, Lane lane) const {
  const std::lock_guard lock(mutex_);
  const Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  const Wait& wait = peer.waits[static_cast<size_t>(lane)];
  const bool is_known = !is_gone(peer) && Clock::now() - wait.noted <= kWaitLife;
  return is_known ? wait.awaited : std::vector<int32_t>();
}

std::optional<WaitingCall> RemoteTransport::waiting_call_of(int32_t peer_rank) const {
  const std::lock_guard lock(mutex_);
  const Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  return is_gone(peer) ? std::nullopt : peer.waits[static_cast<size_t>(Lane::kCollective)].call;
}

void RemoteTransport::take_pong(int32_t peer_rank, const FrameHeader& header, const Payload& payload) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  for (Wait& wait : peer.waits) wait = {{}, {}, Clock::now()};
  std::span<const std::byte> rest = payload.span();
  if (header.index == 1) {
    WaitingCall& call = peer.waits[static_cast<size_t>(Lane::kCollective)].call.emplace();
    std::memcpy(call.data(), rest.data(), call.size());
    rest = rest.subspan(call.size());
  }
  std::vector<int32_t> ranks(rest.size() / sizeof(int32_t));
  if (!ranks.empty()) std::memcpy(ranks.data(), rest.data(), rest.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool is_rank = ranks[i] >= 0 && ranks[i] < options_.world_size;
    if (is_rank) peer.waits[i < header.value ? 0 : 1].awaited.push_back(ranks[i]);
  }
}

size_t RemoteTransport::take_queued(Incoming& stream, std::span<std::byte> data) {
  size_t moved = 0;
  while (moved < data.size() && !stream.queue.empty()) {
    const std::span<const std::byte> rest = stream.queue.front().span().subspan(stream.offset);
    const size_t bytes = std::min(rest.size(), data.size() - moved);
    std::memcpy(data.data() + moved, rest.data(), bytes);
    moved += bytes;
    stream.offset += bytes;
    if (bytes == rest.size()) {
      stream.queue.pop_front();
      stream.offset = 0;
    }
  }
  stream.taken += moved;
  return moved;
}

void RemoteTransport::tell_taken(int32_t peer, size_t lane) {
  Incoming& stream = peers_[static_cast<size_t>(peer)].incoming[lane];
  if (stream.taken - stream.told >= static_cast<uint64_t>(options_.window_bytes) / 2) {
    stream.told = stream.taken;
    send_small(peer, FrameKind::kCredit, static_cast<uint8_t>(lane), stream.taken);
  }
}

void RemoteTransport::send_small(int32_t peer, FrameKind kind, uint8_t index, uint64_t value,
                                 std::span<const std::byte> payload) {
  if (is_closed_ || peers_[static_cast<size_t>(peer)].remote.is_lost) return;
  wire_->send(peer, {kind, index, 0, static_cast<uint32_t>(payload.size()), value}, payload, Urgency::kMustTake);
}

bool RemoteTransport::progress() {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return false;
  return read_from(-1);
}

bool RemoteTransport::arm() {
  const std::lock_guard lock(mutex_);
  return is_closed_ || wire_->arm();
}

void RemoteTransport::check_frame(int32_t peer_rank, const FrameHeader& header) {
  const Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (header.payload_bytes > kMaxPayloadBytes) throw_senseless("a frame that is too long");
  switch (header.kind) {
    case FrameKind::kData: {
      if (header.index >= kLaneCount) throw_senseless("bytes of a stream that does not exist");
      const Incoming& stream = peer.incoming[header.index];
      if (stream.received - stream.taken + header.payload_bytes > limit_bytes()) {
        throw_senseless("more than its window allows");
      }
      return;
    }
    case FrameKind::kCredit:
      if (header.index >= kLaneCount || header.payload_bytes != 0) throw_senseless("a damaged credit");
      return;
    case FrameKind::kState:
      if (header.payload_bytes > kFailureBytes) throw_senseless("a text that is too long");
      return;
    case FrameKind::kPing:
      if (header.payload_bytes != 0) throw_senseless("a damaged question for a sign of life");
      return;
    case FrameKind::kPong: {
      const size_t call_bytes = header.index * kWaitingCallBytes;
      const size_t count = (header.payload_bytes - call_bytes) / sizeof(int32_t);
      const bool is_whole = header.index <= 1 && header.payload_bytes == call_bytes + count * sizeof(int32_t) &&
                            count <= kLaneCount * kMaxNamedWaits;
      if (!is_whole || header.value > count) throw_senseless("a damaged sign of life");
      return;
    }
  }
  throw_senseless("a frame of an unknown kind");
}

void RemoteTransport::take_frame(int32_t peer_rank, const FrameHeader& header, Payload payload) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (wanted_ != Wanted{header.kind, peer_rank, header.index}) ++events_;
  switch (header.kind) {
    case FrameKind::kData: {
      Incoming& stream = peer.incoming[header.index];
      stream.received += payload.bytes;
      if (payload.bytes > 0) stream.queue.push_back(std::move(payload));
      break;
    }
    case FrameKind::kCredit:
      take_credit(peer_rank, header.index, header.value);
      break;
    case FrameKind::kState:
      take_state(peer_rank, header.value, payload);
      break;
    case FrameKind::kPing:
      peer.owes_pong = owes_pongs_ = true;
      break;
    case FrameKind::kPong:
      take_pong(peer_rank, header, payload);
      break;
  }
}

void RemoteTransport::take_credit(int32_t peer_rank, size_t lane, uint64_t taken) {
  Outgoing& stream = peers_[static_cast<size_t>(peer_rank)].outgoing[lane];
  // The receiver can be neither ahead of the sender nor behind where it has been.
  if (taken - stream.taken > stream.sent - stream.taken) throw_senseless("an impossible credit");
  stream.taken = taken;
}

void RemoteTransport::take_state(int32_t peer_rank, uint64_t state, const Payload& payload) {
  RemoteState& remote = peers_[static_cast<size_t>(peer_rank)].remote;
  if (remote.state == RankState::kFailed || remote.state == RankState::kDeparted) return;  // the first one counts
  if (state == static_cast<uint64_t>(RankState::kDeparted)) {
    remote.state = RankState::kDeparted;
  } else {
    remote.state = RankState::kFailed;
    remote.failure = printable(as_text(payload), kFailureBytes);
  }
  state_changes_.fetch_add(1, std::memory_order_release);
}

void RemoteTransport::lose_peer(int32_t peer_rank, const std::string& reason) {
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  ++events_;
  if (!is_gone(peer)) {
    peer.remote.is_lost = true;
    peer.remote.loss = reason;
  }
  state_changes_.fetch_add(1, std::memory_order_release);
}

void RemoteTransport::note_sign_of_life(int32_t peer_rank) { peers_[static_cast<size_t>(peer_rank)].asked = {}; }

void RemoteTransport::tell_state(RankState state, std::string_view text) {
  const std::lock_guard lock(mutex_);
  for (const int32_t rank : options_.peers) {
    send_small(rank, FrameKind::kState, 0, static_cast<uint64_t>(state), as_bytes_of(text.substr(0, kFailureBytes)));
  }
}

RemoteState RemoteTransport::state_of(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return peers_.at(static_cast<size_t>(peer)).remote;
}

void RemoteTransport::greet() {
  const std::lock_guard lock(mutex_);
  for (const int32_t rank : options_.peers) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.asked = peer.last_asked = Clock::now();
    send_small(rank, FrameKind::kPing, 0, 0);
  }
}

void RemoteTransport::ask_for_life() {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  wire_->lose_unreachable(*this);
  const auto now = Clock::now();
  for (const int32_t rank : options_.peers) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (is_gone(peer) || peer.asked != Clock::time_point{} || now - peer.last_asked < kAskInterval) continue;
    peer.asked = peer.last_asked = now;
    send_small(rank, FrameKind::kPing, 0, 0);
  }
}

std::vector<int32_t> RemoteTransport::silent_for(std::chrono::milliseconds limit) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::vector<int32_t> silent;
  for (const int32_t rank : options_.peers) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.asked != Clock::time_point{} && now - peer.asked >= limit) silent.push_back(rank);
  }
  return silent;
}

void RemoteTransport::close(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  wire_->close(patience);
}

}  // namespace zeropg

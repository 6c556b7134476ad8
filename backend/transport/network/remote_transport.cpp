#include "backend/transport/network/remote_transport.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "backend/platform/process/doorbell.h"

namespace zeropg {
namespace {

constexpr size_t kMostToldOfFailure = 256;  // beside those that this rank has met

std::span<const std::byte> as_bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

[[noreturn]] void throw_senseless(const char* what) {
  C10_THROW_ERROR(DistNetworkError, c10::str("it sent ", what, ", as no zeropg of this version does"));
}

}  // namespace

RemoteTransport::RemoteTransport(std::unique_ptr<Wire> wire, RemoteTransportOptions options)
    : owner_(::getpid()),
      wire_(std::move(wire)),
      options_(std::move(options)),
      liveness_(options_.world_size, options_.peers),
      streams_(static_cast<size_t>(options_.world_size)) {
  TORCH_INTERNAL_ASSERT(options_.window_bytes > 0);
  for (const int32_t peer : options_.peers) streams_.at(static_cast<size_t>(peer)).is_member = true;
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
  return peer >= 0 && peer < options_.world_size && streams_[static_cast<size_t>(peer)].is_member;
}

PeerStreams& RemoteTransport::streams_of(int32_t rank) {
  TORCH_INTERNAL_ASSERT(can_reach(rank), wire_->name(), " transport: rank ", options_.rank, " cannot reach rank ",
                        rank);
  return streams_[static_cast<size_t>(rank)];
}

void RemoteTransport::throw_gone(int32_t peer) const {
  const std::string reason = liveness_.why_gone(peer);
  C10_THROW_ERROR(DistNetworkError,
                  c10::str(wire_->name(), " transport: ",
                           reason.empty() ? c10::str("closed, so rank ", peer, " cannot be reached") : reason));
}

size_t RemoteTransport::try_send(int32_t peer, Lane lane, std::span<const std::byte> data) {
  const std::lock_guard lock(mutex_);
  OutgoingStream& stream = streams_of(peer).outgoing[static_cast<size_t>(lane)];
  const uint64_t others_before = awaited_.others();
  awaited_.await(FrameKind::kCredit, peer, static_cast<uint8_t>(lane));
  size_t moved = 0;
  bool has_looked = false;
  while (moved < data.size()) {
    if (is_gone(peer)) throw_gone(peer);
    const uint64_t credit = stream_limit_bytes(options_.window_bytes) - stream.in_flight_bytes();
    size_t bytes = std::min<uint64_t>({data.size() - moved, credit, kMaxPayloadBytes});
    bytes = wire_->room(peer, bytes);
    const FrameHeader header{FrameKind::kData, static_cast<uint8_t>(lane), 0, static_cast<uint32_t>(bytes), 0};
    if (bytes > 0 && wire_->send(peer, header, data.subspan(moved, bytes), Urgency::kCanWait)) {
      stream.note_sent(bytes);
      moved += bytes;
    } else if (std::exchange(has_looked, true) || !read_from(peer)) {  // which may bring credit, or make room
      break;
    }
  }
  if (awaited_.others() != others_before) ring_doorbell(process_doorbell());  // Note [Other people's frames]
  return moved;
}

size_t RemoteTransport::try_receive(int32_t peer, Lane lane, std::span<std::byte> data) {
  const std::lock_guard lock(mutex_);
  IncomingStream& stream = streams_of(peer).incoming[static_cast<size_t>(lane)];
  const uint64_t others_before = awaited_.others();
  size_t moved = stream.take(data);
  if (moved < data.size() && !is_closed_) {
    awaited_.await(FrameKind::kData, peer, static_cast<uint8_t>(lane));
    moved += awaited_.read_into(data.subspan(moved), [&] { read_from(peer); });
    moved += stream.take(data.subspan(moved));
  }
  if (moved > 0) {
    if (const std::optional<uint64_t> taken = stream.credit_to_tell(options_.window_bytes)) {
      send_small(peer, FrameKind::kCredit, static_cast<uint8_t>(lane), *taken);
    }
  }
  if (awaited_.others() != others_before) ring_doorbell(process_doorbell());  // Note [Other people's frames]
  // A rank that sent and then left is still heard to the end.
  if (moved == 0 && !data.empty() && is_gone(peer)) throw_gone(peer);
  return moved;
}

std::map<int32_t, std::vector<std::byte>> RemoteTransport::unread(Lane lane, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  std::map<int32_t, std::vector<std::byte>> by_rank;
  for (const int32_t peer : options_.peers) {
    const IncomingStream& incoming = streams_[static_cast<size_t>(peer)].incoming[static_cast<size_t>(lane)];
    if (incoming.queued_bytes() >= bytes) incoming.peek(by_rank[peer] = std::vector<std::byte>(bytes));
  }
  return by_rank;
}

std::span<std::byte> RemoteTransport::place_for(int32_t peer, const FrameHeader& header) {
  const std::span<std::byte> place = awaited_.place();
  if (place.empty() || !awaited_.includes(peer, header)) return {};
  return streams_[static_cast<size_t>(peer)].incoming[header.index].queued_bytes() == 0 ? place
                                                                                        : std::span<std::byte>();
}

void RemoteTransport::note_placed(int32_t peer, const FrameHeader& header, size_t bytes) {
  streams_[static_cast<size_t>(peer)].incoming[header.index].note_placed(bytes);
  awaited_.note_placed(bytes);
}

bool RemoteTransport::read_from(int32_t peer) {
  const bool has_moved = wire_->progress(peer, *this);
  // One answer for however many questions, and only when there is room for it: a peer that asks and does not read must
  // not fill our memory.
  const std::vector<int32_t> askers = liveness_.askers();
  if (askers.empty()) return has_moved;
  const SignOfLife sign = liveness_.sign_of_life();
  for (const int32_t asker : askers) {
    if (wire_->send(asker, sign.header, sign.payload, Urgency::kCanWait)) liveness_.note_answered(asker);
  }
  return has_moved;
}

void RemoteTransport::send_small(int32_t peer, FrameKind kind, uint8_t index, uint64_t value,
                                 std::span<const std::byte> payload) {
  if (is_closed_ || liveness_.state_of(peer).is_lost) return;
  wire_->send(peer, {kind, index, 0, static_cast<uint32_t>(payload.size()), value}, payload, Urgency::kMustTake);
}

bool RemoteTransport::progress() {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return false;
  return read_from(-1);
}

bool RemoteTransport::has_unfinished() const {
  const std::lock_guard lock(mutex_);
  return !is_closed_ && wire_->has_unfinished();
}

bool RemoteTransport::arm() {
  const std::lock_guard lock(mutex_);
  return is_closed_ || wire_->arm();
}

std::optional<Delivery> RemoteTransport::delivery_to(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return is_closed_ ? std::nullopt : wire_->delivery_to(peer);
}

void RemoteTransport::check_frame(int32_t peer, const FrameHeader& header) {
  if (header.payload_bytes > kMaxPayloadBytes) throw_senseless("a frame that is too long");
  switch (header.kind) {
    case FrameKind::kData: {
      if (header.index >= kStreamCount) throw_senseless("bytes of a stream that does not exist");
      const IncomingStream& stream = streams_[static_cast<size_t>(peer)].incoming[header.index];
      if (stream.queued_bytes() + header.payload_bytes > stream_limit_bytes(options_.window_bytes)) {
        throw_senseless("more than its window allows");
      }
      return;
    }
    case FrameKind::kCredit:
      if (header.index >= kStreamCount || header.payload_bytes != 0) throw_senseless("a damaged credit");
      return;
    case FrameKind::kState:
    case FrameKind::kPing:
    case FrameKind::kPong:
      if (const char* fault = PeerLiveness::fault_in(header)) throw_senseless(fault);
      return;
  }
  throw_senseless("a frame of an unknown kind");
}

void RemoteTransport::take_frame(int32_t peer, const FrameHeader& header, Payload payload) {
  if (!awaited_.includes(peer, header)) awaited_.note_other();
  switch (header.kind) {
    case FrameKind::kData:
      streams_[static_cast<size_t>(peer)].incoming[header.index].put(std::move(payload));
      break;
    case FrameKind::kCredit:
      if (!streams_[static_cast<size_t>(peer)].outgoing[header.index].take_credit(header.value))
        throw_senseless("an impossible credit");
      break;
    case FrameKind::kState:
    case FrameKind::kPing:
    case FrameKind::kPong:
      liveness_.take_frame(peer, header, payload);
      break;
  }
}

void RemoteTransport::lose_peer(int32_t peer, const std::string& reason) {
  awaited_.note_other();
  liveness_.lose(peer, reason);
}

void RemoteTransport::note_sign_of_life(int32_t peer) { liveness_.note_sign_of_life(peer); }

void RemoteTransport::tell_state(RankState state, std::string_view text) {
  const std::lock_guard lock(mutex_);
  liveness_.note_own_state(state, std::string(text.substr(0, kFailureBytes)));
  // Who waits for a third rank that knows nothing of this failure would wait on; so in a group that is not very large
  // all are called.
  const bool tells_all = state == RankState::kFailed && options_.peers.size() <= kMostToldOfFailure;
  for (const int32_t rank : options_.peers) {
    if (tells_all || wire_->has_met(rank)) send_own_state(rank);
  }
}

void RemoteTransport::note_connected(int32_t peer) {
  awaited_.note_other();  // what waited to be sent can be sent
  send_own_state(peer);
}

void RemoteTransport::send_own_state(int32_t peer) {
  const auto [state, text] = liveness_.own_state();
  if (state == RankState::kAlive) return;
  send_small(peer, FrameKind::kState, 0, static_cast<uint64_t>(state), as_bytes_of(text));
}

void RemoteTransport::ask(const std::vector<int32_t>& peers) {
  for (const int32_t peer : peers) send_small(peer, FrameKind::kPing, 0, 0);
}

void RemoteTransport::greet(const std::vector<int32_t>& peers) {
  const std::lock_guard lock(mutex_);
  liveness_.note_asked(peers);
  ask(peers);
}

void RemoteTransport::ask_for_life(const std::vector<int32_t>& peers) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return;
  wire_->lose_unreachable(*this);
  ask(liveness_.ask_due(peers));
}

void RemoteTransport::close(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  wire_->close(patience);
  liveness_.forget_waits();
}

}  // namespace zeropg

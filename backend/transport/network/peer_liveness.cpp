#include "backend/transport/network/peer_liveness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "backend/diagnostics/printable.h"

namespace zeropg {
namespace {

constexpr std::chrono::milliseconds kAskInterval{500};
constexpr std::chrono::milliseconds kOwnWaitLife{500};  // Note [Waits]
constexpr std::chrono::milliseconds kWaitLife{1'500};   // of a peer's, which is asked every kAskInterval

std::string_view as_text(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.data.get()), payload.bytes};
}

}  // namespace

PeerLiveness::PeerLiveness(int32_t world_size, std::vector<int32_t> peers)
    : world_size_(world_size), peers_(std::move(peers)), by_rank_(static_cast<size_t>(world_size)) {}

bool PeerLiveness::is_gone(const RemoteState& remote) {
  return remote.is_lost || remote.state == RankState::kFailed || remote.state == RankState::kDeparted;
}

RemoteState PeerLiveness::state_of(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return by_rank_.at(static_cast<size_t>(peer)).remote;
}

bool PeerLiveness::is_gone(int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return is_gone(by_rank_.at(static_cast<size_t>(peer)).remote);
}

std::string PeerLiveness::why_gone(int32_t peer) const {
  const RemoteState remote = state_of(peer);
  if (remote.state == RankState::kFailed) return c10::str("rank ", peer, " failed: ", remote.failure);
  if (remote.state == RankState::kDeparted) return c10::str("rank ", peer, " left the group");
  return remote.is_lost ? c10::str("rank ", peer, " is lost: ", remote.loss) : "";
}

std::vector<int32_t> PeerLiveness::silent_for(std::chrono::milliseconds limit) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::vector<int32_t> silent;
  for (const int32_t rank : peers_) {
    const Peer& peer = by_rank_[static_cast<size_t>(rank)];
    if (peer.asked != Clock::time_point{} && now - peer.asked >= limit) silent.push_back(rank);
  }
  return silent;
}

std::vector<int32_t> PeerLiveness::waits_of(int32_t peer_rank, Lane lane) const {
  const std::lock_guard lock(mutex_);
  const Peer& peer = by_rank_.at(static_cast<size_t>(peer_rank));
  const Wait& wait = peer.waits[static_cast<size_t>(lane)];
  const bool is_known = !is_gone(peer.remote) && Clock::now() - wait.noted <= kWaitLife;
  return is_known ? wait.awaited : std::vector<int32_t>();
}

std::optional<WaitingCall> PeerLiveness::waiting_call_of(int32_t peer_rank) const {
  const std::lock_guard lock(mutex_);
  const Peer& peer = by_rank_.at(static_cast<size_t>(peer_rank));
  return is_gone(peer.remote) ? std::nullopt : peer.waits[static_cast<size_t>(Lane::kCollective)].call;
}

void PeerLiveness::note_wait(Lane lane, const std::vector<int32_t>& awaited, const std::optional<WaitingCall>& call) {
  const std::lock_guard lock(mutex_);
  Wait& wait = waits_[static_cast<size_t>(lane)];
  wait.awaited.assign(awaited.begin(), awaited.begin() + std::min(awaited.size(), kMaxNamedWaits));
  wait.call = call;
  wait.noted = Clock::now();
}

void PeerLiveness::note_own_state(RankState state, std::string text) {
  const std::lock_guard lock(mutex_);
  own_state_ = {state, std::move(text)};
}

PeerLiveness::OwnState PeerLiveness::own_state() const {
  const std::lock_guard lock(mutex_);
  return own_state_;
}

void PeerLiveness::forget_waits() {
  const std::lock_guard lock(mutex_);
  for (Peer& peer : by_rank_) {
    for (Wait& wait : peer.waits) wait = {};
  }
}

const char* PeerLiveness::fault_in(const FrameHeader& header) {
  switch (header.kind) {
    case FrameKind::kState:
      return header.payload_bytes > kFailureBytes ? "a text that is too long" : nullptr;
    case FrameKind::kPing:
      return header.payload_bytes != 0 ? "a damaged question for a sign of life" : nullptr;
    default: {
      const size_t call_bytes = header.index * kWaitingCallBytes;
      const size_t count = (header.payload_bytes - call_bytes) / sizeof(int32_t);
      const bool is_whole = header.index <= 1 && header.payload_bytes == call_bytes + count * sizeof(int32_t) &&
                            count <= kLaneCount * kMaxNamedWaits;
      return !is_whole || header.value > count ? "a damaged sign of life" : nullptr;
    }
  }
}

void PeerLiveness::take_frame(int32_t peer_rank, const FrameHeader& header, const Payload& payload) {
  const std::lock_guard lock(mutex_);
  Peer& peer = by_rank_[static_cast<size_t>(peer_rank)];
  switch (header.kind) {
    case FrameKind::kState:
      take_state(peer.remote, header.value, payload);
      return;
    case FrameKind::kPing:
      peer.is_asker = has_askers_ = true;
      return;
    default:
      take_pong(peer, header, payload);
  }
}

void PeerLiveness::take_state(RemoteState& remote, uint64_t state, const Payload& payload) {
  if (remote.state == RankState::kFailed || remote.state == RankState::kDeparted) return;  // the first one counts
  if (state == static_cast<uint64_t>(RankState::kDeparted)) {
    remote.state = RankState::kDeparted;
  } else {
    remote.state = RankState::kFailed;
    remote.failure = printable(as_text(payload), kFailureBytes);
  }
  state_changes_.fetch_add(1, std::memory_order_release);
}

void PeerLiveness::take_pong(Peer& peer, const FrameHeader& header, const Payload& payload) {
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
    const bool is_rank = ranks[i] >= 0 && ranks[i] < world_size_;
    if (is_rank) peer.waits[i < header.value ? 0 : 1].awaited.push_back(ranks[i]);
  }
}

void PeerLiveness::note_sign_of_life(int32_t peer) {
  const std::lock_guard lock(mutex_);
  by_rank_[static_cast<size_t>(peer)].asked = {};
}

void PeerLiveness::lose(int32_t peer, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  RemoteState& remote = by_rank_[static_cast<size_t>(peer)].remote;
  if (!is_gone(remote)) {
    remote.is_lost = true;
    remote.loss = reason;
  }
  state_changes_.fetch_add(1, std::memory_order_release);
}

void PeerLiveness::note_asked(const std::vector<int32_t>& peers) {
  const std::lock_guard lock(mutex_);
  for (const int32_t rank : peers) {
    Peer& peer = by_rank_.at(static_cast<size_t>(rank));
    peer.asked = peer.last_asked = Clock::now();
  }
}

std::vector<int32_t> PeerLiveness::ask_due(const std::vector<int32_t>& peers) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::vector<int32_t> due;
  for (const int32_t rank : peers) {
    Peer& peer = by_rank_.at(static_cast<size_t>(rank));
    const bool is_asked = peer.asked != Clock::time_point{} || now - peer.last_asked < kAskInterval;
    if (is_asked || is_gone(peer.remote)) continue;
    peer.asked = peer.last_asked = now;
    due.push_back(rank);
  }
  return due;
}

std::vector<int32_t> PeerLiveness::askers() {
  const std::lock_guard lock(mutex_);
  std::vector<int32_t> ranks;
  if (!has_askers_) return ranks;
  for (const int32_t rank : peers_) {
    const Peer& peer = by_rank_[static_cast<size_t>(rank)];
    if (peer.is_asker && !is_gone(peer.remote)) ranks.push_back(rank);
  }
  has_askers_ = !ranks.empty();
  return ranks;
}

SignOfLife PeerLiveness::sign_of_life() const {
  const std::lock_guard lock(mutex_);
  const Wait collective = own_wait(Lane::kCollective);
  const Wait messages = own_wait(Lane::kPointToPoint);
  SignOfLife sign;
  sign.payload.reserve(kWaitingCallBytes + kLaneCount * kMaxNamedWaits * sizeof(int32_t));
  const auto append = [&](std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) sign.payload.push_back(byte);
  };
  if (collective.call) append(*collective.call);
  append(std::as_bytes(std::span(collective.awaited)));
  append(std::as_bytes(std::span(messages.awaited)));
  sign.header = {FrameKind::kPong, static_cast<uint8_t>(collective.call ? 1 : 0), 0,
                 static_cast<uint32_t>(sign.payload.size()), collective.awaited.size()};
  return sign;
}

PeerLiveness::Wait PeerLiveness::own_wait(Lane lane) const {
  const Wait& wait = waits_[static_cast<size_t>(lane)];
  return Clock::now() - wait.noted <= kOwnWaitLife ? wait : Wait{};
}

std::vector<int32_t> PeerLiveness::own_waits(Lane lane) const {
  const std::lock_guard lock(mutex_);
  return own_wait(lane).awaited;
}

void PeerLiveness::note_answered(int32_t peer) {
  const std::lock_guard lock(mutex_);
  by_rank_[static_cast<size_t>(peer)].is_asker = false;
}

}  // namespace zeropg

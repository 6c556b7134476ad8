#include "backend/engine/fingerprint_between_nodes.h"

#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>

namespace zeropg {

namespace {

// `counts`: of the bytes for, or from, each peer.
CallFingerprint with_pair_bytes(CallFingerprint call, const std::vector<int64_t>& counts, int32_t peer) {
  call.pair_bytes = counts.empty() ? 0 : counts[static_cast<size_t>(peer)];
  return call;
}

}  // namespace

void compare_with_unread(const CollectiveContext& context) {
  if (context.network == nullptr) return;
  const CallFingerprint& ours = context.last_call();
  for (const auto& [peer, first_bytes] : context.network->unread(Lane::kCollective, sizeof(CallFingerprint))) {
    CallFingerprint theirs;
    std::memcpy(&theirs, first_bytes.data(), sizeof theirs);
    if (theirs.sequence <= ours.sequence) check_call(theirs, ours, context.topology.rank, peer);
  }
}

InternodeFingerprints::InternodeFingerprints(CollectiveContext& context, const CollectiveSpec& spec,
                                             const CallFingerprint& call)
    : context_(context),
      spec_(spec),
      call_(call),
      is_near_needed_(traits_of(spec.op).has_counts && !announces_blocks(spec)) {
  if (is_near_needed_ || !context.topology.is_one_node()) {
    pairs_.resize(static_cast<size_t>(context.topology.world_size()));
  }
}

bool InternodeFingerprints::is_needed(int32_t peer) const {
  return !pairs_.empty() && (is_near_needed_ || !context_.topology.is_on_this_node(peer));
}

void InternodeFingerprints::compare_with_waiting() const {
  for (int32_t peer = 0; peer < static_cast<int32_t>(pairs_.size()); ++peer) {
    if (context_.topology.is_on_this_node(peer)) continue;
    const std::optional<WaitingCall> said = context_.network->liveness().waiting_call_of(peer);
    if (!said) continue;
    const auto theirs = std::bit_cast<CallFingerprint>(*said);
    if (theirs.sequence == call_.sequence) check(theirs, call_, peer);
  }
}

bool InternodeFingerprints::send_to(int32_t peer) {
  if (!is_needed(peer)) {
    return true;
  }
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  if (pair.sent < sizeof(CallFingerprint)) {
    const CallFingerprint ours = with_pair_bytes(call_, spec_.send_bytes, peer);
    const auto rest = std::as_bytes(std::span(&ours, 1)).subspan(pair.sent);
    pair.sent += context_.transports[peer]->try_send(peer, Lane::kCollective, rest);
  }
  return pair.sent == sizeof(CallFingerprint);
}

bool InternodeFingerprints::receive_from(int32_t peer) {
  if (!is_needed(peer)) {
    return true;
  }
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  if (pair.received == sizeof(CallFingerprint)) {
    return true;
  }
  const auto rest = std::as_writable_bytes(std::span(&pair.theirs, 1)).subspan(pair.received);
  pair.received += context_.transports[peer]->try_receive(peer, Lane::kCollective, rest);
  if (pair.received < sizeof(CallFingerprint)) {
    return false;
  }
  check(pair.theirs, with_pair_bytes(call_, spec_.receive_bytes, peer), peer);
  return true;
}

void InternodeFingerprints::check(const CallFingerprint& theirs, const CallFingerprint& ours, int32_t peer) const {
  if (difference(theirs, ours).is_none()) return;
  const std::string codec = spec_.codec == nullptr ? "" : spec_.codec->description();
  check_call(theirs, ours, context_.topology.rank, peer, codec);
}

}  // namespace zeropg

#include "backend/engine/fingerprint_between_nodes.h"

#include <bit>
#include <optional>
#include <span>

namespace zeropg {

InternodeFingerprints::InternodeFingerprints(GroupContext& group, const PlannedCollective& collective,
                                             uint64_t sequence)
    : group_(group),
      collective_(collective),
      sequence_(sequence),
      is_near_needed_(collective.spec.op == OpKind::kAllToAll && !announces_blocks(collective.spec)) {
  if (is_near_needed_ || !group.is_one_node()) {
    pairs_.resize(static_cast<size_t>(group.world_size()));
  }
}

bool InternodeFingerprints::is_needed(int32_t peer) const {
  return !pairs_.empty() && (is_near_needed_ || !group_.is_on_this_node(peer));
}

CallHeader InternodeFingerprints::header() const {
  const CollectiveSpec& spec = collective_.spec;
  CallHeader header;
  header.magic = CallHeader::kMagic;
  header.sequence = sequence_;
  header.call = {.op = static_cast<uint32_t>(spec.op),
                 .dtype = static_cast<uint32_t>(collective_.dtype_id),
                 .reduce_op = static_cast<uint32_t>(collective_.reduce_op),
                 .root = spec.root,
                 .bytes = spec.bytes,
                 .factor = collective_.factor.real()};
  header.imaginary_factor = collective_.factor.imag();
  header.codec = spec.codec == nullptr ? 0 : hash_of(spec.codec->description());
  header.algorithm = hash_of(collective_.schedule->algorithm);
  return header;
}

CallHeader InternodeFingerprints::header_for(int32_t peer) const {
  CallHeader header = this->header();
  header.pair_bytes = collective_.spec.op == OpKind::kAllToAll ? collective_.spec.send_bytes[peer] : 0;
  return header;
}

WaitingCall InternodeFingerprints::of_this_rank() const { return std::bit_cast<WaitingCall>(header()); }

void InternodeFingerprints::compare_with_waiting() const {
  for (int32_t peer = 0; peer < static_cast<int32_t>(pairs_.size()); ++peer) {
    if (group_.is_on_this_node(peer)) continue;
    const std::optional<WaitingCall> said = group_.network()->liveness().waiting_call_of(peer);
    if (!said) continue;
    const auto theirs = std::bit_cast<CallHeader>(*said);
    if (theirs.sequence == sequence_) check_header(theirs, header(), group_.rank(), peer);
  }
}

bool InternodeFingerprints::send_to(int32_t peer) {
  if (!is_needed(peer)) {
    return true;
  }
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  if (pair.sent < sizeof(CallHeader)) {
    const CallHeader header = header_for(peer);
    const auto rest = std::as_bytes(std::span(&header, 1)).subspan(pair.sent);
    pair.sent += group_.transport_to(peer).try_send(peer, Lane::kCollective, rest);
  }
  return pair.sent == sizeof(CallHeader);
}

bool InternodeFingerprints::receive_from(int32_t peer) {
  if (!is_needed(peer)) {
    return true;
  }
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  if (pair.received == sizeof(CallHeader)) {
    return true;
  }
  const auto rest = std::as_writable_bytes(std::span(&pair.theirs, 1)).subspan(pair.received);
  pair.received += group_.transport_to(peer).try_receive(peer, Lane::kCollective, rest);
  if (pair.received < sizeof(CallHeader)) {
    return false;
  }
  const CollectiveSpec& spec = collective_.spec;
  CallHeader expected = header_for(peer);
  expected.pair_bytes = spec.op == OpKind::kAllToAll ? spec.receive_bytes[peer] : 0;
  check_header(pair.theirs, expected, group_.rank(), peer);
  return true;
}

}  // namespace zeropg

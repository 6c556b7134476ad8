#include "backend/call_header.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <bit>
#include <span>

namespace zeropg {

namespace {

constexpr uint64_t kMagic = 0x31'6c'6c'61'63'67'70'7a;  // "zpgcall1": catches a stream that got out of step

bool has_root(OpKind op) {
  return op == OpKind::kBroadcast || op == OpKind::kReduce || op == OpKind::kGather || op == OpKind::kScatter;
}

bool is_same(const CallHeader& a, const CallHeader& b) {
  return a.call.op == b.call.op && a.call.dtype == b.call.dtype && a.call.reduce_op == b.call.reduce_op &&
         a.call.root == b.call.root && a.call.bytes == b.call.bytes &&
         std::bit_cast<uint64_t>(a.call.factor) == std::bit_cast<uint64_t>(b.call.factor) &&
         std::bit_cast<uint64_t>(a.imaginary_factor) == std::bit_cast<uint64_t>(b.imaginary_factor) &&
         a.codec == b.codec && a.algorithm == b.algorithm;
}

}  // namespace

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

std::string describe_call(const CallDescription& call) {
  if (call.op > static_cast<uint32_t>(OpKind::kBarrier) || call.dtype >= static_cast<uint32_t>(c10::NumScalarTypes) ||
      call.reduce_op >= static_cast<uint32_t>(kReduceOpCount)) {
    return "garbage";
  }
  const auto op = static_cast<OpKind>(call.op);
  if (op == OpKind::kBarrier && call.bytes == 0) {
    return "barrier()";
  }
  std::string text = c10::str(op_name(op), "(", c10::toString(static_cast<c10::ScalarType>(call.dtype)));
  if (is_reducing(op)) {
    const auto reduce_op = static_cast<ReduceOp>(call.reduce_op);
    text += c10::str(", ", reduce_op_name(reduce_op));
    if (reduce_op == ReduceOp::kPremulSum) {
      text += c10::str(" with factor ", call.factor);
    }
  }
  if (has_root(op)) {
    text += c10::str(", root ", call.root);
  }
  if (op != OpKind::kAllToAll) {
    text += c10::str(", ", call.bytes, " bytes");
  }
  return text + ")";
}

CallHeaders::CallHeaders(Group& group, const Collective& collective, uint64_t sequence)
    : group_(group), collective_(collective), sequence_(sequence) {
  if (!group.is_one_node()) {
    pairs_.resize(static_cast<size_t>(group.world_size()));
  }
}

CallHeader CallHeaders::header_for(int32_t peer) const {
  const CollectiveSpec& spec = collective_.spec;
  CallHeader header;
  header.magic = kMagic;
  header.sequence = sequence_;
  header.call = {.op = static_cast<uint32_t>(spec.op),
                 .dtype = static_cast<uint32_t>(collective_.dtype_id),
                 .reduce_op = static_cast<uint32_t>(collective_.reduce_op),
                 .root = spec.root,
                 .bytes = spec.bytes,
                 .factor = collective_.factor.real()};
  header.imaginary_factor = collective_.factor.imag();
  header.pair_bytes = spec.op == OpKind::kAllToAll ? spec.send_bytes[peer] : 0;
  header.codec = spec.codec == nullptr ? 0 : hash_of(spec.codec->description());
  header.algorithm = hash_of(collective_.schedule->algorithm);
  return header;
}

bool CallHeaders::send_to(int32_t peer) {
  if (pairs_.empty() || group_.is_on_this_node(peer)) {
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

bool CallHeaders::receive_from(int32_t peer) {
  if (pairs_.empty() || group_.is_on_this_node(peer)) {
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
  compare(peer, pair.theirs);
  return true;
}

void CallHeaders::compare(int32_t peer, const CallHeader& theirs) const {
  const CallHeader mine = header_for(peer);
  TORCH_CHECK_WITH(DistBackendError, theirs.magic == kMagic, "rank ", peer,
                   " sent something that is no call; its memory or ours is damaged");
  if (theirs.sequence != mine.sequence || !is_same(theirs, mine)) {
    const std::string note = theirs.codec != mine.codec           ? " with different compression"
                             : theirs.algorithm != mine.algorithm ? " or run different algorithms for them"
                                                                  : "";
    C10_THROW_ERROR(DistBackendError,
                    c10::str("the ranks made different calls", note, ": rank ", group_.rank(), ": ",
                             describe_call(mine.call), "; rank ", peer, ": ", describe_call(theirs.call),
                             theirs.sequence == mine.sequence ? "" : c10::str(" as #", theirs.sequence),
                             "; make the same call with the same sizes on every rank."));
  }
  if (collective_.spec.op == OpKind::kAllToAll) {
    TORCH_CHECK_WITH(DistBackendError, theirs.pair_bytes == collective_.spec.receive_bytes[peer], "rank ", peer,
                     " sends ", theirs.pair_bytes, " bytes to this rank, which expects ",
                     collective_.spec.receive_bytes[peer], "; make the splits of both ranks match.");
  }
}

}  // namespace zeropg

#include "backend/group/call_fingerprint.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstring>

#include "backend/collectives/reduce/reduce_op.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/diagnostics/printable.h"

namespace zeropg {

namespace {

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

std::string describe_call(const CallFingerprint& call) {
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

void check_header(const CallHeader& theirs, const CallHeader& expected, int32_t rank, int32_t peer) {
  TORCH_CHECK_WITH(DistBackendError, theirs.magic == expected.magic, "rank ", peer,
                   " sent something that is no call; its memory or ours is damaged");
  if (theirs.sequence != expected.sequence || !is_same(theirs, expected)) {
    const std::string note = theirs.codec != expected.codec           ? " with different compression"
                             : theirs.algorithm != expected.algorithm ? " or run different algorithms for them"
                                                                      : "";
    C10_THROW_ERROR(DistBackendError,
                    c10::str("the ranks made different calls", note, ": rank ", rank, ": ",
                             describe_call(expected.call), "; rank ", peer, ": ", describe_call(theirs.call),
                             theirs.sequence == expected.sequence ? "" : c10::str(" as #", theirs.sequence),
                             "; make the same call with the same sizes on every rank."));
  }
  TORCH_CHECK_WITH(DistBackendError, theirs.pair_bytes == expected.pair_bytes, "rank ", peer, " sends ",
                   theirs.pair_bytes, " bytes to this rank, which expects ", expected.pair_bytes,
                   "; make the splits of both ranks match.");
}

std::string describe_announcement(const Announcement& said) {
  AnnouncedReduction reduction;
  std::memcpy(&reduction, said.payload, sizeof(reduction));
  const std::string call = describe_call({.op = said.op,
                                          .dtype = said.dtype,
                                          .reduce_op = said.reduce_op,
                                          .root = said.root,
                                          .bytes = said.bytes,
                                          .factor = reduction.factor});
  const bool is_reduction =
      said.op == static_cast<uint32_t>(OpKind::kAllReduce) || said.op == static_cast<uint32_t>(OpKind::kReduceScatter);
  const std::string codec =
      printable({reduction.codec, strnlen(reduction.codec, sizeof(reduction.codec))}, sizeof(reduction.codec));
  return is_reduction && !codec.empty() ? call + " as " + codec : call;
}

}  // namespace zeropg

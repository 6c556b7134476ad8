#include "backend/group/call_fingerprint.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <bit>
#include <cstdio>

#include "backend/collectives/reduce/reduce_op.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/diagnostics/printable.h"

namespace zeropg {

namespace {

// A call says of its codec only whether it is the same.
std::string_view codec_of(const CallFingerprint& theirs, const CallFingerprint& ours, std::string_view codec) {
  if (theirs.codec == 0) return {};
  return theirs.codec == ours.codec ? codec : "another codec";
}

bool is_same_number(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

}  // namespace

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

CallDifference difference(const CallFingerprint& theirs, const CallFingerprint& ours) {
  return {.is_senseless = theirs.magic != ours.magic,
          .in_call = theirs.sequence != ours.sequence || theirs.op != ours.op || theirs.dtype != ours.dtype ||
                     theirs.reduce_op != ours.reduce_op || theirs.root != ours.root || theirs.bytes != ours.bytes ||
                     theirs.item != ours.item || !is_same_number(theirs.factor, ours.factor) ||
                     !is_same_number(theirs.imaginary_factor, ours.imaginary_factor),
          .in_codec = theirs.codec != ours.codec,
          .in_algorithm = theirs.algorithm != ours.algorithm,
          .in_pair = theirs.pair_bytes != ours.pair_bytes};
}

std::string describe_call(const CallFingerprint& call, std::string_view codec) {
  if (call.magic != CallFingerprint::kMagic || call.op >= kOpKindCount ||
      call.dtype >= static_cast<uint32_t>(c10::NumScalarTypes) ||
      call.reduce_op >= static_cast<uint32_t>(kReduceOpCount)) {
    return "garbage";
  }
  const OpTraits& op = kOpTraits[call.op];
  if (op.input == BlockCount::kNone && call.bytes == 0) {
    return c10::str(op.name, "()");
  }
  std::string text = c10::str(op.name, "(", c10::toString(static_cast<c10::ScalarType>(call.dtype)));
  if (op.is_reducing) {
    const auto reduce_op = static_cast<ReduceOp>(call.reduce_op);
    text += c10::str(", ", reduce_op_name(reduce_op));
    if (reduce_op == ReduceOp::kPremulSum) {
      std::array<char, 64> factor{};  // all digits: factors are compared bit for bit
      std::snprintf(factor.data(), factor.size(), call.imaginary_factor == 0 ? "%.17g" : "%.17g%+.17gj", call.factor,
                    call.imaginary_factor);
      text += c10::str(" with factor ", factor.data());
    }
  }
  if (call.root == CallFingerprint::kAboutLinks) {
    text += ", the ranks' own before a large one, about links";
  } else if (op.has_root) {
    text += c10::str(", root ", call.root);
  }
  if (!op.has_counts) {
    text += c10::str(", ", call.bytes, " bytes");
  }
  if (call.item != 0) {
    text += c10::str(", item ", call.item);
  }
  text += ")";
  return codec.empty() ? text : text + " as " + printable(codec, codec.size());
}

void check_call(const CallFingerprint& theirs, const CallFingerprint& ours, int32_t rank, int32_t peer,
                std::string_view codec) {
  const CallDifference found = difference(theirs, ours);
  TORCH_CHECK_WITH(DistBackendError, !found.is_senseless, "rank ", peer,
                   " sent something that is no call; its memory or ours is damaged");
  if (found.in_algorithm && !found.in_call && !found.in_codec) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("ranks ", rank, " and ", peer, " run ", describe_call(ours, codec),
                             " by different algorithms, or with other shares of nodes; give "
                             "BackendOptions(algorithms=...), the links and the version of zeropg the same value on "
                             "every rank."));
  }
  if (found.in_call || found.in_codec) {
    const std::string note = found.in_codec ? " with different compression" : "";
    C10_THROW_ERROR(DistBackendError,
                    c10::str("the ranks made different calls", note, ": rank ", rank, ": ", describe_call(ours, codec),
                             "; rank ", peer, ": ", describe_call(theirs, codec_of(theirs, ours, codec)),
                             theirs.sequence == ours.sequence ? "" : c10::str(" as #", theirs.sequence),
                             "; make the same call with the same sizes on every rank."));
  }
  TORCH_CHECK_WITH(DistBackendError, !found.in_pair, "rank ", peer, " sends ", theirs.pair_bytes,
                   " bytes to this rank, which expects ", ours.pair_bytes, "; make the splits of both ranks match.");
}

}  // namespace zeropg

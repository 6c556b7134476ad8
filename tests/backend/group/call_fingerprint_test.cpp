#include "backend/group/call_fingerprint.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "backend/collectives/reduce/reduce_op.h"
#include "backend/collectives/schedule/collective_spec.h"

namespace zeropg {
namespace {

constexpr uint32_t kFloat = 6;  // at::ScalarType

CallFingerprint call_of(OpKind op) {
  return {.sequence = 41, .op = static_cast<uint32_t>(op), .dtype = kFloat, .bytes = 40, .codec = 7, .algorithm = 8};
}

std::string refusal(const CallFingerprint& theirs, const CallFingerprint& ours) {
  try {
    check_call(theirs, ours, 0, 3);
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(CallFingerprint, DiffersInWhateverARankCallsOtherwise) {
  const CallFingerprint ours = call_of(OpKind::kReduce);
  const auto differs = [&](auto change) {
    CallFingerprint theirs = ours;
    change(theirs);
    const CallDifference found = difference(theirs, ours);
    return std::string(found.is_senseless ? "senseless " : "") + (found.in_call ? "call " : "") +
           (found.in_codec ? "codec " : "") + (found.in_algorithm ? "algorithm " : "") + (found.in_pair ? "pair " : "");
  };
  EXPECT_EQ(differs([](CallFingerprint&) {}), "");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.magic; }), "senseless ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.sequence; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.op; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.dtype; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.reduce_op; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.root; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.bytes; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.item; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { call.factor = std::numeric_limits<double>::quiet_NaN(); }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { call.imaginary_factor = -0.0; }), "call ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.codec; }), "codec ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.algorithm; }), "algorithm ");
  EXPECT_EQ(differs([](CallFingerprint& call) { ++call.pair_bytes; }), "pair ");
}

TEST(CallFingerprint, IsPutIntoWords) {
  CallFingerprint call = call_of(OpKind::kReduce);
  EXPECT_EQ(describe_call(call), "reduce(Float, sum, root 0, 40 bytes)");
  call.reduce_op = static_cast<uint32_t>(ReduceOp::kPremulSum);
  call.factor = 0.5;
  EXPECT_EQ(describe_call(call), "reduce(Float, premul_sum with factor 0.5, root 0, 40 bytes)");
  EXPECT_EQ(describe_call(call_of(OpKind::kAllReduce), "fp16()"), "all_reduce(Float, sum, 40 bytes) as fp16()");
  EXPECT_EQ(describe_call(call_of(OpKind::kAllReduce), "\x1b[31m"), "all_reduce(Float, sum, 40 bytes) as  [31m");
  EXPECT_EQ(describe_call(call_of(OpKind::kAllToAll)), "all_to_all(Float)");
  CallFingerprint gather = call_of(OpKind::kAllGather);
  gather.item = 3;
  EXPECT_EQ(describe_call(gather), "all_gather(Float, 40 bytes, item 3)");
  CallFingerprint barrier = call_of(OpKind::kBarrier);
  EXPECT_EQ(describe_call(barrier), "barrier(Float, 40 bytes)");
  barrier.bytes = 0;
  EXPECT_EQ(describe_call(barrier), "barrier()");
}

TEST(CallFingerprint, IsGarbageWhereItsNumbersMeanNothing) {
  CallFingerprint call = call_of(OpKind::kBroadcast);
  call.op = kOpKindCount;
  EXPECT_EQ(describe_call(call), "garbage");
  call = call_of(OpKind::kBroadcast);
  call.dtype = 255;
  EXPECT_EQ(describe_call(call), "garbage");
  call = call_of(OpKind::kBroadcast);
  call.reduce_op = kReduceOpCount;
  EXPECT_EQ(describe_call(call), "garbage");
  call = call_of(OpKind::kBroadcast);
  call.magic = 0;
  EXPECT_EQ(describe_call(call), "garbage");
}

TEST(CallFingerprint, OfAnotherRankIsRefusedWithWhatBothCalled) {
  const CallFingerprint ours = call_of(OpKind::kAllReduce);
  EXPECT_EQ(refusal(ours, ours), "");
  CallFingerprint theirs = ours;
  theirs.bytes = 80;
  theirs.sequence = 42;
  EXPECT_EQ(refusal(theirs, ours),
            "the ranks made different calls: rank 0: all_reduce(Float, sum, 40 bytes); rank 3: all_reduce(Float, sum,"
            " 80 bytes) as #42; make the same call with the same sizes on every rank.");
  theirs.codec = 0;
  EXPECT_NE(refusal(theirs, ours).find("different calls with different compression: "), std::string::npos);
  theirs = ours;
  theirs.algorithm = 1;
  EXPECT_NE(refusal(theirs, ours).find("ranks 0 and 3 run all_reduce(Float, sum, 40 bytes) by different algorithms"),
            std::string::npos);
  theirs = ours;
  theirs.pair_bytes = 4;
  EXPECT_EQ(refusal(theirs, ours),
            "rank 3 sends 4 bytes to this rank, which expects 0; make the splits of both ranks match.");
  theirs.magic = 0;
  EXPECT_EQ(refusal(theirs, ours), "rank 3 sent something that is no call; its memory or ours is damaged");
}

}  // namespace
}  // namespace zeropg

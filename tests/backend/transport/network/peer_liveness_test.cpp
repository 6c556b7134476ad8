#include "backend/transport/network/peer_liveness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace zeropg {
namespace {

using std::chrono::milliseconds;

void tell_state(PeerLiveness& liveness, int32_t peer, RankState state, const std::string& text = "") {
  Payload payload{std::make_unique<std::byte[]>(text.size()), text.size()};
  std::memcpy(payload.data.get(), text.data(), text.size());
  const FrameHeader header{FrameKind::kState, 0, 0, static_cast<uint32_t>(text.size()), static_cast<uint64_t>(state)};
  liveness.take_frame(peer, header, payload);
}

// What `from` says of itself, as it comes to `to`, who knows it as `rank`.
void hand_over(const PeerLiveness& from, PeerLiveness& to, int32_t rank) {
  const SignOfLife sign = from.sign_of_life();
  ASSERT_EQ(PeerLiveness::fault_in(sign.header), nullptr);
  Payload payload{std::make_unique<std::byte[]>(sign.payload.size()), sign.payload.size()};
  std::copy(sign.payload.begin(), sign.payload.end(), payload.data.get());
  to.take_frame(rank, sign.header, payload);
}

TEST(PeerLiveness, TheFirstWordOfAPeerCounts) {
  PeerLiveness liveness(4, {1, 2, 3});
  EXPECT_EQ(liveness.why_gone(1), "");
  tell_state(liveness, 1, RankState::kFailed, "no\nmemory");
  tell_state(liveness, 1, RankState::kDeparted);
  liveness.lose(1, "it closed the connection");
  EXPECT_EQ(liveness.why_gone(1), "rank 1 failed: no memory");
  EXPECT_FALSE(liveness.state_of(1).is_lost);
  tell_state(liveness, 2, RankState::kDeparted);
  EXPECT_EQ(liveness.why_gone(2), "rank 2 left the group");
  liveness.lose(3, "it closed the connection");
  EXPECT_EQ(liveness.why_gone(3), "rank 3 is lost: it closed the connection");
  EXPECT_EQ(liveness.state_changes(), 4U);
}

TEST(PeerLiveness, AQuestionIsOpenUntilAnythingComesAndIsNotAskedAgain) {
  PeerLiveness liveness(3, {1, 2});
  EXPECT_TRUE(liveness.silent_for(milliseconds(0)).empty()) << "nobody was asked";
  EXPECT_EQ(liveness.ask_due({2}), std::vector<int32_t>{2});
  EXPECT_EQ(liveness.ask_due({1, 2}), std::vector<int32_t>{1});
  EXPECT_TRUE(liveness.ask_due({1, 2}).empty());
  liveness.note_sign_of_life(2);
  EXPECT_EQ(liveness.silent_for(milliseconds(0)), std::vector<int32_t>{1});
  EXPECT_TRUE(liveness.silent_for(milliseconds(60'000)).empty());
  liveness.note_asked({1, 2});
  EXPECT_EQ(liveness.silent_for(milliseconds(0)), (std::vector<int32_t>{1, 2}));
}

TEST(PeerLiveness, WhoAsksIsOwedOneAnswerUnlessItIsGone) {
  PeerLiveness liveness(3, {1, 2});
  const FrameHeader ping{FrameKind::kPing, 0, 0, 0, 0};
  for (const int32_t peer : {1, 2, 2}) liveness.take_frame(peer, ping, {});
  EXPECT_EQ(liveness.askers(), (std::vector<int32_t>{1, 2}));
  liveness.note_answered(1);
  EXPECT_EQ(liveness.askers(), std::vector<int32_t>{2});
  liveness.lose(2, "it closed the connection");
  EXPECT_TRUE(liveness.askers().empty());
}

TEST(PeerLiveness, ASignOfLifeSaysForWhomAndInWhichCallItsSenderWaits) {
  PeerLiveness one(5, {1, 4});
  PeerLiveness other(5, {0});
  WaitingCall call{};
  call[7] = std::byte{13};
  other.note_wait(Lane::kCollective, {0, 3}, call);
  other.note_wait(Lane::kPointToPoint, {2, 77, -1}, std::nullopt);  // there are 5 ranks
  hand_over(other, one, 4);
  EXPECT_EQ(one.waits_of(4, Lane::kCollective), (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(one.waits_of(4, Lane::kPointToPoint), std::vector<int32_t>{2});
  EXPECT_EQ(one.waiting_call_of(4), call);
  EXPECT_EQ(one.waiting_call_of(1), std::nullopt);
  one.forget_waits();
  EXPECT_TRUE(one.waits_of(4, Lane::kCollective).empty());
  EXPECT_EQ(one.waiting_call_of(4), std::nullopt);
}

TEST(PeerLiveness, FramesThatMakeNoSenseHaveAFault) {
  constexpr auto kCall = static_cast<uint32_t>(kWaitingCallBytes);
  const FrameHeader lies[] = {
      {FrameKind::kState, 0, 0, static_cast<uint32_t>(kFailureBytes) + 1, 2},
      {FrameKind::kPing, 0, 0, 1, 0},
      {FrameKind::kPong, 2, 0, 2 * kCall, 0},
      {FrameKind::kPong, 1, 0, kCall - 1, 0},
      {FrameKind::kPong, 1, 0, 0, 0},
      {FrameKind::kPong, 0, 0, 3, 0},
      {FrameKind::kPong, 0, 0, 8, 3},  // more ranks in a lane than there are
      {FrameKind::kPong, 0, 0, static_cast<uint32_t>((kLaneCount * kMaxNamedWaits + 1) * sizeof(int32_t)), 0},
  };
  for (const FrameHeader& lie : lies) {
    EXPECT_NE(PeerLiveness::fault_in(lie), nullptr) << static_cast<int>(lie.kind) << " " << lie.payload_bytes;
  }
  EXPECT_EQ(PeerLiveness::fault_in({FrameKind::kPong, 1, 0, kCall + 8, 2}), nullptr);
}

}  // namespace
}  // namespace zeropg

// What a rank takes in from one peer, whose stream the suite writes byte by byte: also what no MessageSender writes.
#include "backend/p2p/message_receiver.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <span>

#include "tests/backend/p2p/messages.h"

namespace zeropg {
namespace {

constexpr uint64_t kHuge = uint64_t{1} << 62;

template <typename Value>
std::vector<std::byte> bytes_of(const Value& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> header(uint64_t bytes, int32_t tag, uint16_t magic = MessageHeader::kBytesFollow) {
  return bytes_of(MessageHeader{.bytes = bytes, .tag = tag, .magic = magic});
}

std::vector<std::byte> offer(uint64_t bytes, int32_t tag, const MemoryOffer& memory) {
  return bytes_of(MessageStart{{.bytes = bytes, .tag = tag, .magic = MessageHeader::kOfferFollows}, memory});
}

MemoryOffer own_memory(const void* address) { return {-1, own_cma_identity(), reinterpret_cast<uint64_t>(address)}; }

std::vector<std::byte> operator+(std::vector<std::byte> one, const std::vector<std::byte>& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

// Rank 0 receives; rank 1 is the suite.
class MessageReceiverTest : public ::testing::Test {
 protected:
  Message& post(int64_t bytes, int32_t tag, int32_t peer = 1) {
    messages_.push_back(make_receive(0, peer, tag, bytes, host_));
    posted_.push({messages_.back().message, messages_.size(), std::chrono::steady_clock::now()});
    return messages_.back();
  }
  bool advance() { return receiver_.advance(posted_, finished_, order_); }
  size_t put(std::span<const std::byte> bytes) {
    return ranks_[1]->transport_to(0).try_send(0, Lane::kPointToPoint, bytes);
  }
  // Sends all of it, as room comes.
  void send(const std::vector<std::byte>& bytes) {
    std::span<const std::byte> rest(bytes);
    for (int idle = 0; !rest.empty() && idle < 3;) {
      const size_t taken = put(rest);
      rest = rest.subspan(taken);
      const bool has_moved = advance();
      idle = taken > 0 || has_moved ? 0 : idle + 1;
    }
    ASSERT_TRUE(rest.empty());
    while (advance()) {
    }
  }
  std::atomic<uint64_t>& answered() const {
    return ranks_[0]->arena().mailbox_counters(1, 0, static_cast<int32_t>(Lane::kPointToPoint)).answered;
  }
  void expect_whole(const Message& message, const std::vector<std::byte>& data) const {
    EXPECT_TRUE(message.received() == data);
    EXPECT_TRUE(is_guard_untouched(message));
    EXPECT_EQ(message.work->sourceRank(), 1);
  }

  Contexts ranks_ = meet(3);
  const std::shared_ptr<IdleHost> host_ = std::make_shared<IdleHost>();
  std::deque<Message> messages_;
  PostedReceives posted_;
  FinishedMessages finished_;
  uint64_t order_ = 0;
  MessageReceiver receiver_{*ranks_[0], 1, /*may_use_cma=*/true};
};

TEST_F(MessageReceiverTest, TakesMessagesOfAnySizeAlsoLargerThanTheRing) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{7}, kMailboxBytes - 1, kMailboxBytes, kMailboxBytes + 1, int64_t{54'321}}) {
    const Message& message = post(bytes, 3);
    const auto data = pattern(bytes, static_cast<uint64_t>(bytes));
    send(header(static_cast<uint64_t>(bytes), 3) + data);
    ASSERT_EQ(finished_.size(), messages_.size()) << bytes;
    expect_whole(message, data);
  }
}

TEST_F(MessageReceiverTest, TakesAStreamThatComesByteByByte) {
  const auto data = pattern(100);
  const Message& message = post(100, 3);
  for (const std::byte each : header(100, 3) + data) {
    ASSERT_EQ(put({&each, 1}), 1U);
    EXPECT_TRUE(advance());
    EXPECT_FALSE(advance());
  }
  ASSERT_EQ(finished_.size(), 1U);
  expect_whole(message, data);
}

TEST_F(MessageReceiverTest, LeavesInTheRingWhatNobodyWaitsFor) {
  put(header(4, 3) + pattern(4));
  EXPECT_FALSE(advance());
  post(4, 3);
  EXPECT_TRUE(advance());
  EXPECT_EQ(finished_.size(), 1U);
  put(header(4, 3) + pattern(4));
  EXPECT_FALSE(advance());
  EXPECT_TRUE(receiver_.set_aside().empty());
}

TEST_F(MessageReceiverTest, SetsAsideWhatComesBeforeTheMessageThatIsWanted) {
  const Message& wanted = post(2000, 9);
  send(header(0, 1) + header(1, 2) + pattern(1) + header(3000, 2) + pattern(3000, 5) + header(2000, 9) +
       pattern(2000, 7));
  ASSERT_EQ(finished_.size(), 1U);
  expect_whole(wanted, pattern(2000, 7));
  const auto& aside = receiver_.set_aside();
  ASSERT_EQ(aside.size(), 3U);
  EXPECT_EQ(order_, 3U);
  uint64_t order = 0;
  for (const SetAside& message : aside) {
    EXPECT_EQ(message.order, ++order);
    EXPECT_TRUE(message.is_whole());
  }
  EXPECT_EQ(aside.front().tag, 1);
  EXPECT_TRUE(aside.back().data == pattern(3000, 5));
}

TEST_F(MessageReceiverTest, LooksForAReceiveAfterEachMessageThatItSetsAside) {
  post(1, 9);
  put(header(1, 1) + pattern(1) + header(1, 2) + pattern(1));
  EXPECT_TRUE(advance());
  EXPECT_EQ(receiver_.set_aside().size(), 1U);
  post(1, 2);
  EXPECT_TRUE(advance());
  EXPECT_EQ(receiver_.set_aside().size(), 1U);
  EXPECT_EQ(finished_.size(), 1U);
}

TEST_F(MessageReceiverTest, FinishesAMessageThatItSetsAsideThoughItsReceiveCameMeanwhile) {
  post(1, 9);
  const auto data = pattern(500);
  put(header(500, 2) + std::vector(data.begin(), data.begin() + 100));
  advance();
  post(500, 2);
  put(std::span(data).subspan(100));
  EXPECT_TRUE(advance());
  EXPECT_TRUE(finished_.empty());
  EXPECT_TRUE(receiver_.set_aside().front().is_whole());
}

TEST_F(MessageReceiverTest, RefusesAnotherSizeThanTheReceivesWithoutTouchingItsMemory) {
  for (const uint64_t said : {uint64_t{0}, uint64_t{99}, uint64_t{101}, kHuge, ~uint64_t{0}}) {
    MessageReceiver receiver(*ranks_[0], 1, true);
    const Message& message = post(100, 3);
    put(header(said, 3));
    const std::string error = error_of([&] { receiver.advance(posted_, finished_, order_); });
    expect_words(error, {"rank 1 sent ", std::to_string(said).c_str(), "this rank receives 100", "same size"});
    EXPECT_TRUE(receiver.target().has_value());  // for its owner to fail
    EXPECT_TRUE(message.received() == std::vector<std::byte>(100, kUntouched));
    EXPECT_TRUE(is_guard_untouched(message));
  }
}

TEST_F(MessageReceiverTest, RefusesAHeaderThatIsNone) {
  for (const uint16_t magic : {uint16_t{0}, uint16_t{0xFFFF}, uint16_t{MessageHeader::kBytesFollow + 1}}) {
    MessageReceiver receiver(*ranks_[0], 1, true);
    post(4, 3);
    put(header(4, 3, magic));
    expect_words(error_of([&] { receiver.advance(posted_, finished_, order_); }),
                 {"rank 1 sent a message that is none", "was overwritten"});
  }
}

TEST_F(MessageReceiverTest, DoesNotBelieveALengthThatNobodyWants) {
  post(4, 3);
  send(header(kHuge, 5) + pattern(5000));
  EXPECT_FALSE(advance());
  const SetAside& aside = receiver_.set_aside().front();
  EXPECT_FALSE(aside.is_whole());
  EXPECT_EQ(aside.data.size(), 5000U);
  EXPECT_LE(aside.data.capacity(), size_t{4} << 20);
}

TEST_F(MessageReceiverTest, ReadsAnOfferInThePoolAndSaysSo) {
  std::byte* block = ranks_[1]->pool()->allocate(700);
  const auto data = pattern(700);
  std::ranges::copy(data, block);
  const int64_t offset = ranks_[1]->pool()->offset_of(block, 700);
  const Message& wanted = post(700, 3);
  send(offer(700, 3, {offset, {}, 0}));
  ASSERT_EQ(finished_.size(), 1U);
  expect_whole(wanted, data);
  EXPECT_EQ(answered(), answer_to(1, Answer::kHaveIt));
  post(1, 9);
  send(offer(700, 4, {offset, {}, 0}));
  EXPECT_TRUE(receiver_.set_aside().front().data == data);
  EXPECT_EQ(answered(), answer_to(2, Answer::kHaveIt));
}

TEST_F(MessageReceiverTest, RefusesAnOfferThatIsNotAllInThePool) {
  const int64_t part = ranks_[0]->pool()->bytes_per_rank();
  const std::pair<uint64_t, int64_t> lies[] = {
      {100, part - 99},        {100, part}, {100, std::numeric_limits<int64_t>::max()},
      {uint64_t(part) + 1, 0}, {kHuge, 64}, {~uint64_t{0}, 0},
      {uint64_t{1} << 63, 0}};
  for (const auto& [bytes, offset] : lies) {
    for (const bool is_wanted : {true, false}) {
      MessageReceiver receiver(*ranks_[0], 1, true);
      PostedReceives posted;
      const Message message = make_receive(0, 1, is_wanted ? 3 : 9, 100, host_);
      posted.push({message.message, 1, {}});
      put(offer(bytes, 3, {offset, {}, 0}));
      const std::string error = error_of([&] { receiver.advance(posted, finished_, order_); });
      expect_words(error, {"rank 1 sen", std::to_string(bytes).c_str()});
      EXPECT_TRUE(message.received() == std::vector<std::byte>(100, kUntouched));
    }
  }
}

TEST_F(MessageReceiverTest, ReadsOrAsksForWhatLiesInTheSendersMemory) {
  const auto data = pattern(300'001);
  bool was_read = false;
  bool was_received = false;
  for (uint64_t i = 1; i <= 2 * CopyPathTuner::kTrials; ++i) {
    const Message& wanted = post(300'001, 3);
    send(offer(300'001, 3, own_memory(data.data())));
    if (answered() == answer_to(i, Answer::kSendIt)) {
      was_received = true;
      send(data);
    } else {
      was_read = true;
      EXPECT_EQ(answered(), answer_to(i, Answer::kHaveIt));
    }
    ASSERT_EQ(finished_.size(), i);
    expect_whole(wanted, data);
  }
  EXPECT_TRUE(was_read && was_received);  // both ways are tried
}

TEST_F(MessageReceiverTest, AsksForTheBytesWhenItMayNotOrCannotReadThem) {
  MemoryOffer another = own_memory(host_.get());
  another.sender.token[0] ^= 1;
  MemoryOffer nobody = own_memory(host_.get());
  nobody.sender.pid = std::numeric_limits<int32_t>::max();
  const std::pair<bool, MemoryOffer> offers[] = {{false, own_memory(host_.get())},
                                                 {true, another},
                                                 {true, nobody},
                                                 {true, own_memory(nullptr)},
                                                 {true, {-1, own_cma_identity(), ~uint64_t{0} - 50}}};
  const auto data = pattern(100);
  for (const auto& [may_use_cma, memory] : offers) {
    for (const bool is_wanted : {true, false}) {
      MessageReceiver receiver(*ranks_[0], 1, may_use_cma);
      PostedReceives posted;
      const Message message = make_receive(0, 1, is_wanted ? 3 : 9, 100, host_);
      posted.push({message.message, 1, {}});
      answered() = 0;
      put(offer(100, 3, memory));
      receiver.advance(posted, finished_, order_);
      EXPECT_EQ(answered(), answer_to(1, Answer::kSendAll));
      put(data);
      EXPECT_TRUE(receiver.advance(posted, finished_, order_));
      EXPECT_TRUE((is_wanted ? message.received() : receiver.set_aside().front().data) == data);
    }
  }
}

TEST_F(MessageReceiverTest, DoesNotBelieveWhatItReadFromASenderThatGaveUp) {
  const auto data = pattern(100);
  post(100, 3);
  put(offer(100, 3, own_memory(data.data())));
  ranks_[1]->fail({.text = "out of luck"});
  EXPECT_TRUE(advance());
  EXPECT_EQ(answered(), answer_to(1, Answer::kSendAll));
  EXPECT_TRUE(finished_.empty());
  expect_words(error_of([&] { advance(); }), {"rank 1 failed: out of luck"});
}

TEST_F(MessageReceiverTest, HearsAPeerToTheEndAndThenSaysThatItLeft) {
  post(100, 3);
  put(header(100, 3) + pattern(100));
  ranks_[1]->depart();
  EXPECT_TRUE(advance());
  EXPECT_EQ(finished_.size(), 1U);
  post(100, 3);
  expect_words(error_of([&] { advance(); }), {"rank 1 left"});
}

TEST_F(MessageReceiverTest, WaitsForAnybodyElseWhenAPeerIsGoneButNotInTheMiddleOfAMessage) {
  post(100, 3, MessageRoute::kAnySource);
  put(std::span<const std::byte>(header(100, 3)).first(5));
  advance();
  ranks_[1]->depart();
  expect_words(error_of([&] { advance(); }), {"rank 1 left"});
  MessageReceiver fresh(*ranks_[0], 1, true);
  EXPECT_FALSE(fresh.advance(posted_, finished_, order_));
}

}  // namespace
}  // namespace zeropg

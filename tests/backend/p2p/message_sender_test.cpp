// What a rank sends to one peer, whose end of the stream the suite reads: also with answers that no receiver gives.
#include "backend/p2p/message_sender.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "tests/backend/p2p/messages.h"

namespace zeropg {
namespace {

constexpr int64_t kLarge = (256 << 10) + 1;  // the smallest message that is offered

BootstrapOptions group_with_wide_rings() {
  BootstrapOptions options = small_group();
  options.mailbox_bytes = int64_t{64} << 10;
  return options;
}

// Rank 0 sends; rank 1 is the suite.
class MessageSenderTest : public ::testing::Test {
 protected:
  Message& push(std::vector<std::byte> data, int32_t tag = 3) {
    messages_.push_back(make_send(0, 1, tag, std::move(data), host_));
    sender_.push({messages_.back().message, messages_.size(), std::chrono::steady_clock::now()});
    return messages_.back();
  }
  bool advance() { return sender_.advance(finished_); }
  // The next `bytes` of the stream.
  std::vector<std::byte> take(size_t bytes) {
    std::vector<std::byte> taken(bytes);
    size_t done = 0;
    for (int idle = 0; done < bytes && idle < 3;) {
      const bool has_moved = advance();
      const size_t moved =
          ranks_[1]->transport_to(0).try_receive(0, Lane::kPointToPoint, std::span(taken).subspan(done));
      done += moved;
      idle = has_moved || moved > 0 ? 0 : idle + 1;
    }
    EXPECT_EQ(done, bytes);
    return taken;
  }
  template <typename Value>
  Value take_as() {
    Value value;
    const auto bytes = take(sizeof(Value));
    std::memcpy(&value, bytes.data(), sizeof(Value));
    return value;
  }
  bool is_stream_empty() {
    std::byte more{};
    return ranks_[1]->transport_to(0).try_receive(0, Lane::kPointToPoint, {&more, 1}) == 0;
  }
  void answer(uint64_t value) {
    ranks_[1]->arena().mailbox_counters(0, 1, static_cast<int32_t>(Lane::kPointToPoint)).answered.store(value);
  }

  Contexts ranks_ = meet(2, group_with_wide_rings());
  const std::shared_ptr<IdleHost> host_ = std::make_shared<IdleHost>();
  std::deque<Message> messages_;
  FinishedMessages finished_;
  MessageSender sender_{*ranks_[0], 1, /*may_use_cma=*/true};
};

TEST_F(MessageSenderTest, PutsAHeaderInFrontOfMessagesOfAnySize) {
  for (const int64_t bytes : {0, 1, 7, 65'535, 65'536, 65'537, 200'003}) {
    const auto data = pattern(bytes, static_cast<uint64_t>(bytes));
    push(data, 5);
    const auto header = take_as<MessageHeader>();
    EXPECT_EQ(header.magic, MessageHeader::kBytesFollow);
    EXPECT_EQ(header.bytes, static_cast<uint64_t>(bytes));
    EXPECT_EQ(header.tag, 5);
    EXPECT_TRUE(take(static_cast<size_t>(bytes)) == data);
    EXPECT_EQ(finished_.size(), messages_.size());
    EXPECT_TRUE(is_stream_empty());
  }
}

TEST_F(MessageSenderTest, HasSentAMessageOnceTheRingHasItsLastByte) {
  push(pattern(100'000));
  EXPECT_TRUE(advance());
  EXPECT_FALSE(advance());
  EXPECT_TRUE(finished_.empty());
  take(60'000);
  advance();
  EXPECT_EQ(finished_.size(), 1U);
}

TEST_F(MessageSenderTest, KeepsTheOrderOfTheCallsWhateverTheTags) {
  for (const int32_t tag : {9, 0, -4, 9}) push(pattern(3, static_cast<uint64_t>(tag)), tag);
  EXPECT_TRUE(advance());
  EXPECT_EQ(finished_.size(), 4U);
  for (const int32_t tag : {9, 0, -4, 9}) {
    EXPECT_EQ(take_as<MessageHeader>().tag, tag);
    EXPECT_TRUE(take(3) == pattern(3, static_cast<uint64_t>(tag)));
  }
}

TEST_F(MessageSenderTest, OffersALargeMessageAndKeepsItUntilItIsAnswered) {
  push(pattern(kLarge - 1));
  EXPECT_EQ(take_as<MessageHeader>().magic, MessageHeader::kBytesFollow);
  take(kLarge - 1);
  const Message& large = push(pattern(kLarge));
  push(pattern(1));
  const auto start = take_as<MessageStart>();
  EXPECT_EQ(start.header.magic, MessageHeader::kOfferFollows);
  EXPECT_EQ(start.header.bytes, static_cast<uint64_t>(kLarge));
  EXPECT_EQ(start.offer.pool_offset, -1);
  EXPECT_EQ(start.offer.sender, own_cma_identity());
  EXPECT_EQ(start.offer.address, reinterpret_cast<uint64_t>(large.message.data));
  EXPECT_FALSE(advance());
  EXPECT_TRUE(is_stream_empty());
  EXPECT_EQ(finished_.size(), 1U);
  answer(answer_to(1, Answer::kHaveIt));
  EXPECT_TRUE(advance());
  EXPECT_EQ(finished_.size(), 3U);
  EXPECT_EQ(take_as<MessageHeader>().bytes, 1U);  // and none of the large one's bytes
}

TEST_F(MessageSenderTest, OffersWhatLiesInThePoolByItsPlaceThere) {
  std::byte* block = ranks_[0]->pool()->allocate(kLarge);
  std::ranges::copy(pattern(kLarge), block);
  Message message = make_send(0, 1, 3, {}, host_);
  message.message.data = block;
  message.message.bytes = kLarge;
  sender_.push({message.message, 1, {}});
  const auto start = take_as<MessageStart>();
  EXPECT_EQ(start.offer.pool_offset, ranks_[0]->pool()->offset_of(block, kLarge));
  EXPECT_EQ(start.offer.address, 0U);
  EXPECT_EQ(std::memcmp(ranks_[1]->pool()->at(0, start.offer.pool_offset, kLarge), block, kLarge), 0);
}

TEST_F(MessageSenderTest, SendsWhatTheReceiverWantsSentAndOffersTheNext) {
  push(pattern(kLarge, 1));
  push(pattern(kLarge, 2));
  take_as<MessageStart>();
  answer(answer_to(1, Answer::kSendIt));
  EXPECT_TRUE(take(kLarge) == pattern(kLarge, 1));
  EXPECT_EQ(take_as<MessageStart>().header.magic, MessageHeader::kOfferFollows);
  EXPECT_FALSE(advance());  // the answer was to the first one
  answer(answer_to(2, Answer::kHaveIt));
  EXPECT_TRUE(advance());
  EXPECT_EQ(finished_.size(), 2U);
}

TEST_F(MessageSenderTest, OffersItsMemoryNoMoreOnceTheReceiverCannotReadIt) {
  push(pattern(kLarge, 1));
  push(pattern(kLarge, 2));
  take_as<MessageStart>();
  answer(answer_to(1, Answer::kSendAll));
  EXPECT_TRUE(take(kLarge) == pattern(kLarge, 1));
  EXPECT_EQ(take_as<MessageHeader>().magic, MessageHeader::kBytesFollow);
  EXPECT_TRUE(take(kLarge) == pattern(kLarge, 2));
  EXPECT_EQ(finished_.size(), 2U);
}

TEST_F(MessageSenderTest, OffersNothingThatMayNotBeRead) {
  MessageSender sender(*ranks_[0], 1, /*may_use_cma=*/false);
  const Message message = make_send(0, 1, 3, pattern(kLarge), host_);
  sender.push({message.message, 1, {}});
  sender.advance(finished_);
  EXPECT_EQ(take_as<MessageHeader>().magic, MessageHeader::kBytesFollow);
}

TEST_F(MessageSenderTest, RefusesAnAnswerThatNobodyAskedFor) {
  for (const uint64_t lie : {uint64_t{7}, answer_to(2, Answer::kHaveIt), ~uint64_t{0}}) {
    MessageSender sender(*ranks_[0], 1, true);
    const Message message = make_send(0, 1, 3, pattern(kLarge), host_);
    sender.push({message.message, 1, {}});
    answer(0);
    sender.advance(finished_);
    answer(lie);
    expect_words(error_of([&] { sender.advance(finished_); }), {"rank 1 answered an offer that nobody made"});
    EXPECT_EQ(sender.take_all().size(), 1U);
    EXPECT_TRUE(sender.queue().empty());
  }
}

TEST_F(MessageSenderTest, SaysThatItsPeerLeftOrFailedAndKeepsTheMessage) {
  push(pattern(1));
  ranks_[1]->depart();
  expect_words(error_of([&] { advance(); }), {"rank 1 left"});
  EXPECT_EQ(sender_.queue().size(), 1U);
}

}  // namespace
}  // namespace zeropg

// The channel of messages between ranks that are objects of this process: matching, failures, and who runs it.
#include "backend/p2p/point_to_point.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/backend/child_process.h"
#include "tests/backend/p2p/messages.h"
#include "tests/backend/running_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

constexpr int32_t kAnybody = MessageRoute::kAnySource;
constexpr milliseconds kShort{100};

// Ranks whose messages move only when the suite says so.
class PointToPointTest : public ::testing::Test {
 protected:
  void make_ranks(int32_t world_size) {
    ranks_ = meet(world_size);
    for (const auto& rank : ranks_) {
      channels_.push_back(std::make_unique<PointToPoint>(rank, ProgressEngine::of_this_process(), true));
    }
  }
  Message& send(int32_t from, int32_t to, int32_t tag, std::vector<std::byte> data,
                milliseconds timeout = kLongTimeout) {
    messages_.push_back(make_send(from, to, tag, std::move(data), host_, timeout));
    channels_[from]->post(messages_.back().message);
    return messages_.back();
  }
  Message& receive(int32_t to, int32_t from, int32_t tag, int64_t bytes, milliseconds timeout = kLongTimeout) {
    messages_.push_back(make_receive(to, from, tag, bytes, host_, timeout));
    channels_[to]->post(messages_.back().message);
    return messages_.back();
  }
  // Until nothing moves any more.
  void advance_all() {
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (const auto& channel : channels_) has_moved |= channel->advance_on_engine_thread() == Activity::kMoved;
    }
  }
  void expect_received(const Message& message, const std::vector<std::byte>& data) const {
    ASSERT_TRUE(message.work->is_complete());
    EXPECT_TRUE(message.work->isSuccess());
    EXPECT_TRUE(message.received() == data);
    EXPECT_TRUE(is_guard_untouched(message));
  }
  static std::string error(const Message& message) {
    if (!message.work->is_complete()) return "not complete";
    return error_of([&] { message.work->wait(); });
  }
  // Looks at deadlines and peers, as the engine does now and then, until the message has ended.
  std::string error_after_checks(int32_t rank, const Message& message) {
    poll([&] {
      channels_[rank]->check_on_engine_thread();
      return message.work->is_complete();
    });
    return error(message);
  }

  Contexts ranks_;
  std::vector<std::unique_ptr<PointToPoint>> channels_;
  const std::shared_ptr<IdleHost> host_ = std::make_shared<IdleHost>();
  std::deque<Message> messages_;
};

TEST_F(PointToPointTest, ReceivesByTagInAnyOrderAndMessagesOfOneTagInTheirs) {
  make_ranks(2);
  const std::vector<int64_t> sizes{0, 1, 77, kMailboxBytes, 10'001, 300'000};
  for (size_t i = 0; i < sizes.size(); ++i) send(0, 1, static_cast<int32_t>(i / 2), pattern(sizes[i], i));
  std::vector<Message*> received(sizes.size());
  for (const size_t i : {4, 2, 0, 3, 1, 5}) received[i] = &receive(1, 0, static_cast<int32_t>(i / 2), sizes[i]);
  advance_all();
  for (size_t i = 0; i < sizes.size(); ++i) expect_received(*received[i], pattern(sizes[i], i));
}

TEST_F(PointToPointTest, SendsOnBothSidesBeforeAnyReceiveDoNotBlockEachOther) {
  make_ranks(2);
  for (const int32_t rank : {0, 1}) send(rank, 1 - rank, 3, pattern(100'000, static_cast<uint64_t>(rank)));
  advance_all();
  const Message& zero = receive(0, 1, 3, 100'000);
  const Message& one = receive(1, 0, 3, 100'000);
  advance_all();
  expect_received(zero, pattern(100'000, 1));
  expect_received(one, pattern(100'000, 0));
}

TEST_F(PointToPointTest, AReceiveFromAnybodyTakesWhatCameFirstAndSaysFromWhom) {
  make_ranks(3);
  const Message& blocker = receive(0, 1, 9, 1);
  send(2, 0, 3, pattern(50, 2));
  send(1, 0, 3, pattern(50, 1));
  const Message& of_two = receive(0, 2, 4, 1);  // so that both are set aside
  advance_all();
  const Message& first = receive(0, kAnybody, 3, 50);
  const Message& second = receive(0, kAnybody, 3, 50);
  advance_all();
  EXPECT_EQ(first.work->sourceRank() + second.work->sourceRank(), 3);
  for (const Message* each : {&first, &second}) {
    expect_received(*each, pattern(50, static_cast<uint64_t>(each->work->sourceRank())));
  }
  EXPECT_FALSE(blocker.work->is_complete());
  EXPECT_FALSE(of_two.work->is_complete());
}

TEST_F(PointToPointTest, AMessageThatWasSetAsideMustFitItsReceive) {
  make_ranks(2);
  const Message& waiting = receive(1, 0, 9, 1);
  send(0, 1, 3, pattern(50));
  advance_all();
  const Message& wrong = receive(1, 0, 3, 51);
  expect_words(error(wrong), {"[zeropg rank 1/", "recv", "rank 0 sent 50 bytes, this rank receives 51"});
  EXPECT_TRUE(waiting.work->is_complete());  // the group has failed
  EXPECT_TRUE(wrong.received() == std::vector<std::byte>(51, kUntouched));
}

TEST_F(PointToPointTest, AFailureEndsAllMessagesReachesThePeerAndIsRaisedByLaterCalls) {
  make_ranks(2);
  const Message& theirs = receive(1, 0, 4, 1);
  const Message& receives = receive(0, 1, 3, 1, kShort);
  const Message& sends = send(0, 1, 3, pattern(100'000));
  const std::string text = error_after_checks(0, receives);
  expect_words(text, {"recv #1 from rank 1 with tag 3", "timed out after 100 ms waiting for rank 1"});
  EXPECT_EQ(ranks_[0]->failure().kind, FailureKind::kTimeout);
  EXPECT_EQ(error(sends), text);
  EXPECT_EQ(error_of([&] { receive(0, 1, 3, 1); }), text);
  EXPECT_EQ(error_of([&] { send(0, 1, 3, {}); }), text);
  expect_words(error_after_checks(1, theirs), {"[zeropg rank 1/", "rank 0 failed: ", "timed out after 100 ms"});
}

TEST_F(PointToPointTest, ADeadlineOfAReceiveFromAnybodyNamesWhoIsLeft) {
  make_ranks(3);
  ranks_[1]->depart();
  const Message& message = receive(0, kAnybody, 3, 1, kShort);
  expect_words(error_after_checks(0, message), {"from any rank", "waiting for rank 2"});
}

TEST_F(PointToPointTest, AReceiveFromAnybodyGoesOnUntilNobodyIsLeft) {
  make_ranks(3);
  const Message& first = receive(0, kAnybody, 3, 5);
  const Message& second = receive(0, kAnybody, 3, 5);
  ranks_[1]->depart();
  channels_[0]->check_on_engine_thread();
  EXPECT_FALSE(first.work->is_complete());
  send(2, 0, 3, pattern(5));
  ranks_[2]->depart();  // what it sent before counts
  advance_all();
  expect_received(first, pattern(5));
  expect_words(error_after_checks(0, second), {"ranks 1, 2 left the group"});
}

TEST_F(PointToPointTest, ADepartedPeerIsNamedAndNotAnotherThatLeftBefore) {
  for (const bool is_send : {true, false}) {
    ranks_.clear();
    channels_.clear();
    make_ranks(3);
    ranks_[2]->depart();
    ranks_[1]->depart();
    const Message& message = is_send ? send(0, 1, 3, pattern(5)) : receive(0, 1, 3, 5);
    const std::string text = error_after_checks(0, message);
    expect_words(text, {is_send ? "send #1 to rank 1" : "recv #1 from rank 1", ": rank 1 left the group"});
  }
}

TEST_F(PointToPointTest, GarbageIsBlamedOnItsSenderThoughAnotherHasLeft) {
  make_ranks(3);
  ranks_[2]->depart();
  const Message& other = receive(0, kAnybody, 4, 5);
  const Message& message = receive(0, 1, 3, 5);
  const auto garbage = pattern(100);
  ranks_[1]->transport_to(0).try_send(0, Lane::kPointToPoint, garbage);
  advance_all();
  expect_words(error(message), {"rank 1 sent a message that is none"});
  expect_words(error(other), {"rank 1 sent a message that is none"});
}

TEST_F(PointToPointTest, CountsMessagesAndForWhomTheyWaited) {
  make_ranks(2);
  receive(1, 0, 3, 10);
  advance_all();
  std::this_thread::sleep_for(milliseconds(20));
  send(0, 1, 3, pattern(10));
  advance_all();
  const OperationStatistics statistics = ranks_[1]->statistics().by_name().at("recv");
  EXPECT_EQ(statistics.calls, 1U);
  EXPECT_EQ(statistics.bytes, 10);
  EXPECT_GE(statistics.waiting_seconds.at(0), 0.02);
}

TEST(PointToPoint, NamesAPeerWhoseProcessDied) {
  const auto folder = std::filesystem::temp_directory_path() / ("zeropg-p2p-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const auto join = [&](int rank) {
    const auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), 2);
    return std::make_shared<GroupContext>(bootstrap(store, rank, 2, small_group()), std::make_shared<Hooks>());
  };
  ChildProcess child([&] {
    const auto group = join(1);
    std::this_thread::sleep_for(kLongTimeout);
    return true;
  });
  const auto group = join(0);
  PointToPoint channel(group, ProgressEngine::of_this_process(), true);
  const auto host = std::make_shared<IdleHost>();
  const Message message = make_receive(0, 1, 3, 1, host);
  channel.post(message.message);
  child.kill();
  poll([&] {
    channel.check_on_engine_thread();
    return message.work->is_complete();
  });
  expect_words(error_of([&] { message.work->wait(); }), {"the process of rank 1 died"});
  std::filesystem::remove_all(folder);
}

// Whose works belong to the caller alone.
Message send(RunningRanks& ranks, int32_t from, int32_t to, int32_t tag, std::vector<std::byte> data) {
  Message message = make_send(from, to, tag, std::move(data), ranks[from]->messages());
  ranks[from]->messages()->post(std::move(message.message));
  return message;
}
Message receive(RunningRanks& ranks, int32_t to, int32_t from, int32_t tag, int64_t bytes) {
  Message message = make_receive(to, from, tag, bytes, ranks[to]->messages());
  ranks[to]->messages()->post(std::move(message.message));
  return message;
}

TEST(PointToPointOnTheEngine, MovesAndLetsGoOfWhatNobodyWaitsFor) {
  RunningRanks group({"one", "one"});
  const Message received = receive(group, 1, 0, 3, 300'000);
  const Message sent = send(group, 0, 1, 3, pattern(300'000));
  poll([&] { return received.work->is_complete() && sent.work->is_complete(); });
  EXPECT_TRUE(received.received() == pattern(300'000));
  EXPECT_TRUE(group[1]->wait_until_idle(kLongTimeout));
  send(group, 1, 0, 4, {});  // the next call
  EXPECT_EQ(received.work.use_count(), 1U);
}

TEST(PointToPointOnTheEngine, AWaitWithTooLittleTimeRaisesAndTheMessageGoesOn) {
  RunningRanks group({"one", "one"});
  const Message received = receive(group, 1, 0, 3, 5000);
  expect_words(error_of([&] { received.work->wait(milliseconds(30)); }),
               {"not complete after the 30 ms", "wait again"});
  const Message sent = send(group, 0, 1, 3, pattern(5000));
  EXPECT_TRUE(received.work->wait());
  EXPECT_TRUE(sent.work->wait());
  EXPECT_TRUE(received.received() == pattern(5000));
}

TEST(PointToPointOnTheEngine, TwoGroupsUsedInDifferentOrdersDoNotWaitForEachOther) {
  RunningRanks one({"one", "one"});
  RunningRanks other({"one", "one"});
  on_every_rank(2, [&](int32_t rank) {
    RunningRanks& first = rank == 0 ? one : other;
    RunningRanks& second = rank == 0 ? other : one;
    for (int round = 0; round < 20; ++round) {
      const Message to = send(first, rank, 1 - rank, round, pattern(5000, 1));
      const Message from = receive(second, rank, 1 - rank, round, 5000);
      EXPECT_TRUE(from.work->wait() && to.work->wait());
      EXPECT_TRUE(from.received() == pattern(5000, 1));
      const Message back = send(second, rank, 1 - rank, round, pattern(3, 2));
      const Message there = receive(first, rank, 1 - rank, round, 3);
      EXPECT_TRUE(there.work->wait() && back.work->wait());
    }
  });
}

TEST(PointToPointOnTheEngine, MessagesOfAllSizesPassBetweenNodes) {
  RunningRanks group({"one", "one", "two"});
  on_every_rank(3, [&](int32_t rank) {
    std::vector<Message> messages;
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{300'001}}) {
      for (int32_t peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        messages.push_back(receive(group, rank, peer, static_cast<int32_t>(bytes), bytes));
        messages.push_back(send(group, rank, peer, static_cast<int32_t>(bytes), pattern(bytes, 5)));
      }
    }
    for (const Message& message : messages) EXPECT_TRUE(message.work->wait());
    for (const Message& message : messages) EXPECT_TRUE(message.received() == pattern(message.bytes, 5));
  });
}

TEST(PointToPointOnTheEngine, IsIdleOnlyOnceEveryWorkIsComplete) {
  const auto hooks = std::make_shared<Hooks>();
  hooks->set_completion(1, [](uint64_t, float) { std::this_thread::sleep_for(milliseconds(50)); });
  RunningRanks group({"one", "one"}, hooks);
  const Message received = receive(group, 1, 0, 3, 1);
  std::thread sender([&] { send(group, 0, 1, 3, pattern(1)).work->wait(); });
  EXPECT_TRUE(group[1]->messages()->wait_until_idle(kLongTimeout));
  EXPECT_TRUE(received.work->is_complete());
  sender.join();
}

}  // namespace
}  // namespace zeropg

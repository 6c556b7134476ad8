// Connections between nodes, while no operation runs. Nodes are names here; between them are TCP connections.
#include "backend/engine/network_progress.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{2'000};

class NetworkProgressTest : public ::testing::Test {
 protected:
  void join(const std::vector<std::string>& hosts) {
    ranks_ = meet_on(hosts);
    for (const auto& rank : ranks_) {
      progress_.push_back(std::make_unique<NetworkProgress>(rank, ProgressEngine::of_this_process()));
    }
  }
  void TearDown() override {
    on_every_rank(static_cast<int32_t>(progress_.size()), [&](int32_t rank) { close(rank); });
  }
  void close(int32_t rank) {
    if (const auto open = std::exchange(progress_[rank], nullptr)) open->close(kPatience, true);
  }
  RemoteTransport& network(int32_t rank) { return *ranks_[rank]->network(); }

  Contexts ranks_;
  std::vector<std::unique_ptr<NetworkProgress>> progress_;
};

TEST_F(NetworkProgressTest, StaysOutOfTheEngineWhereAllRanksShareANode) {
  join({"one", "one"});
  EXPECT_EQ(ProgressEngine::of_this_process().callbacks(), nullptr);  // nobody has joined
}

TEST_F(NetworkProgressTest, JoinsTheEngineWithTheRanksOfItsNode) {
  join({"one", "one", "two"});
  EXPECT_EQ(progress_[0]->local_world_size(), 2);
  EXPECT_EQ(progress_[2]->local_world_size(), 1);
  EXPECT_EQ(ProgressEngine::of_this_process().ranks_on_node(), 2);
  EXPECT_GE(progress_[2]->descriptor(), 0);
  for (const int32_t rank : {0, 1, 2}) close(rank);
  EXPECT_EQ(ProgressEngine::of_this_process().callbacks(), nullptr);
}

TEST_F(NetworkProgressTest, BringsTheNewsOfAFailureThoughNothingRuns) {
  join({"one", "two", "three"});
  ranks_[1]->fail({.text = "out of luck"});
  for (const int32_t rank : {0, 2}) {
    poll([&] { return network(rank).state_of(1).state == RankState::kFailed; });
    EXPECT_EQ(network(rank).state_of(1).failure, "out of luck");
    EXPECT_EQ(network(rank).state_of(2 - rank).state, RankState::kAlive);
  }
  const OperationLabel label{.rank = 0, .world_size = 3, .title = "zeropg:barrier"};
  expect_words(error_of([&] { ranks_[0]->throw_if_peer_failed(label); }), {"barrier: rank 1 failed: out of luck"});
}

TEST_F(NetworkProgressTest, SaysThatARankLeftOnPurpose) {
  join({"one", "two"});
  ranks_[1]->depart();
  close(1);
  poll([&] { return network(0).state_of(1).state == RankState::kDeparted; });
  EXPECT_FALSE(network(0).state_of(1).is_lost);
}

TEST_F(NetworkProgressTest, MovesMoreBytesThanAWindowWithoutAnybodyWaiting) {
  join({"one", "two"});
  const auto data = pattern(300'001);
  std::thread sender([&] {
    std::span<const std::byte> rest(data);
    poll([&] {
      rest = rest.subspan(network(0).try_send(1, Lane::kCollective, rest));
      return rest.empty();
    });
  });
  std::vector<std::byte> received(data.size());
  size_t done = 0;
  poll([&] {
    done += network(1).try_receive(0, Lane::kCollective, std::span(received).subspan(done));
    return done == received.size();
  });
  sender.join();
  EXPECT_TRUE(received == data);
}

TEST_F(NetworkProgressTest, LetsTheLastBytesArriveBeforeItCloses) {
  join({"one", "two"});
  const auto data = pattern(50'000);  // less than a window: taken at once
  ASSERT_EQ(network(1).try_send(0, Lane::kPointToPoint, data), data.size());
  ranks_[1]->depart();
  close(1);
  std::vector<std::byte> received(data.size());
  size_t done = 0;
  poll([&] {
    done += network(0).try_receive(1, Lane::kPointToPoint, std::span(received).subspan(done));
    return done == received.size();
  });
  EXPECT_TRUE(received == data);
  std::byte more{};
  expect_words(error_of([&] { poll([&] {
                                return network(0).try_receive(1, Lane::kPointToPoint, {&more, 1}) > 0;
                              }); }),
               {"rank 1"});
}

TEST_F(NetworkProgressTest, ALostConnectionIsNoDeparture) {
  join({"one", "two"});
  close(1);  // as of a process that ends without a word
  poll([&] { return network(0).state_of(1).is_lost; });
  EXPECT_EQ(ranks_[0]->peer_states().dead, std::vector<int32_t>{1});
}

}  // namespace
}  // namespace zeropg

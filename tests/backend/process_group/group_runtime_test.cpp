// What a group does on the progress thread while no operation runs, above all with its connections to other nodes.
// Nodes are names here; between them are TCP connections.
#include "backend/process_group/group_runtime.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{2'000};

ProgressEngine& engine() { return ProgressEngine::of_this_process(); }

class GroupRuntimeTest : public ::testing::Test {
 protected:
  void join(const std::vector<std::string>& hosts) {
    ranks_ = meet_on(hosts);
    runtimes_.resize(ranks_.size());
  }
  void join_and_open(const std::vector<std::string>& hosts) {
    join(hosts);
    for (int32_t rank = 0; rank < static_cast<int32_t>(hosts.size()); ++rank) open(rank);
  }
  void TearDown() override {
    on_every_rank(static_cast<int32_t>(runtimes_.size()), [&](int32_t rank) { close(rank); });
  }
  void open(int32_t rank) { runtimes_[rank] = GroupRuntime::open(ranks_[rank], /*may_use_cma=*/true); }
  void close(int32_t rank) {
    if (const auto open = std::exchange(runtimes_[rank], nullptr)) open->close(kPatience);
  }
  RemoteTransport& network(int32_t rank) { return *ranks_[rank]->network(); }
  RemoteState state_of(int32_t rank, int32_t peer) {
    return network(rank).liveness().state_of(peer);
  }  // as rank sees it

  Contexts ranks_;
  std::vector<std::shared_ptr<GroupRuntime>> runtimes_;
};

TEST_F(GroupRuntimeTest, JoinsTheEngineAlsoWhereAllRanksShareANode) {
  join_and_open({"one", "one"});
  EXPECT_EQ(ranks_[0]->network(), nullptr);
  EXPECT_NE(engine().callbacks(), nullptr);
  EXPECT_EQ(engine().ranks_on_node(), 2);
  for (const int32_t rank : {0, 1}) close(rank);
  EXPECT_EQ(engine().callbacks(), nullptr);
}

TEST_F(GroupRuntimeTest, JoinsTheEngineWithTheRanksOfItsNode) {
  join({"one", "one", "two"});
  open(2);
  EXPECT_EQ(engine().ranks_on_node(), 1);
  for (const int32_t rank : {0, 1}) open(rank);
  EXPECT_EQ(engine().ranks_on_node(), 2);
  for (const int32_t rank : {0, 1, 2}) close(rank);
  EXPECT_EQ(engine().callbacks(), nullptr);
}

TEST_F(GroupRuntimeTest, BringsTheNewsOfAFailureThoughNothingRuns) {
  join_and_open({"one", "two", "three"});
  std::this_thread::sleep_for(milliseconds(60));  // the engine sleeps: only the connections' descriptors wake it
  ranks_[1]->fail({.text = "out of luck"});
  for (const int32_t rank : {0, 2}) {
    poll([&] { return state_of(rank, 1).state == RankState::kFailed; });
    EXPECT_EQ(state_of(rank, 1).failure, "out of luck");
    EXPECT_EQ(state_of(rank, 2 - rank).state, RankState::kAlive);
  }
  const OperationLabel label{.rank = 0, .world_size = 3, .title = "zeropg:barrier"};
  expect_words(error_of([&] { ranks_[0]->peers().throw_if_failed(label); }), {"barrier: rank 1 failed: out of luck"});
}

TEST_F(GroupRuntimeTest, SaysThatARankLeftOnPurpose) {
  join_and_open({"one", "two"});
  close(1);
  poll([&] { return state_of(0, 1).state == RankState::kDeparted; });
  EXPECT_FALSE(state_of(0, 1).is_lost);
}

TEST_F(GroupRuntimeTest, MovesMoreBytesThanAWindowWithoutAnybodyWaiting) {
  join_and_open({"one", "two"});
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

TEST_F(GroupRuntimeTest, LetsTheLastBytesArriveBeforeItCloses) {
  join_and_open({"one", "two"});
  const auto data = pattern(50'000);  // less than a window: taken at once
  ASSERT_EQ(network(1).try_send(0, Lane::kPointToPoint, data), data.size());
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

TEST_F(GroupRuntimeTest, ALostConnectionIsNoDeparture) {
  join({"one", "two"});
  open(0);
  network(1).close(kPatience);  // as of a process that ends without a word
  poll([&] { return state_of(0, 1).is_lost; });
  EXPECT_EQ(ranks_[0]->peers().states().dead, std::vector<int32_t>{1});
}

}  // namespace
}  // namespace zeropg

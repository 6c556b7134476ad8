// The contract of a Wire under the Network protocol, once:
//
//   INSTANTIATE_TEST_SUITE_P(Tcp, NetworkSuite, ::testing::Values(make_tcp_network));
#pragma once

#include <poll.h>

#include <atomic>
#include <deque>
#include <numeric>
#include <string>

#include "backend/transport/network/remote_transport.h"
#include "tests/backend/transport/transport_suite.h"

namespace zeropg {

// Ranks that are all on nodes of their own, with a progress thread each.
class NetworkWorld : public TransportWorld {
 public:
  static constexpr int64_t kWindowBytes = 8192;

  ~NetworkWorld() override {
    for (size_t rank = 0; rank < threads_.size(); ++rank) stop(static_cast<int32_t>(rank));
  }
  RemoteTransport& rank(int32_t rank) override { return *networks_[rank]; }
  void depart(int32_t rank) override {
    networks_[rank]->tell_state(RankState::kDeparted);
    stop(rank);
    networks_[rank]->close(std::chrono::milliseconds(1000));
  }
  void vanish(int32_t rank) {
    stop(rank);
    networks_[rank]->close(std::chrono::milliseconds(0));
  }

 protected:
  // Until everybody has heard from everybody.
  void greet() {
    for (size_t rank = 0; rank < networks_.size(); ++rank) {
      std::vector<int32_t> others(networks_.size());
      std::iota(others.begin(), others.end(), 0);
      std::erase(others, static_cast<int32_t>(rank));
      networks_[rank]->greet(others);
    }
    for (auto& network : networks_) {
      while (!network->liveness().silent_for(std::chrono::milliseconds(0)).empty()) std::this_thread::yield();
    }
  }
  void add(std::unique_ptr<Wire> wire, int32_t world_size) {
    RemoteTransportOptions options{.rank = static_cast<int32_t>(networks_.size()),
                                   .world_size = world_size,
                                   .peers = {},
                                   .window_bytes = kWindowBytes};
    for (int32_t peer = 0; peer < world_size; ++peer) {
      if (peer != options.rank) options.peers.push_back(peer);
    }
    networks_.push_back(std::make_unique<RemoteTransport>(std::move(wire), std::move(options)));
    is_over_.emplace_back(false);
    threads_.emplace_back([&is_over = is_over_.back(), network = networks_.back().get()] {
      while (!is_over) {
        while (network->progress()) {
        }
        if (!network->arm()) continue;
        pollfd entry{network->descriptor(), POLLIN, 0};
        ::poll(&entry, 1, 5);
      }
    });
  }

 private:
  // A network that closes is nobody else's any more: the engine lets go of it too.
  void stop(int32_t rank) {
    is_over_[rank] = true;
    if (threads_[rank].joinable()) threads_[rank].join();
  }

  std::vector<std::unique_ptr<RemoteTransport>> networks_;
  std::vector<std::thread> threads_;
  std::deque<std::atomic<bool>> is_over_;
};

using MakeNetworkWorld = std::unique_ptr<NetworkWorld> (*)(int32_t world_size);

template <typename Condition>
bool eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class NetworkSuite : public ::testing::TestWithParam<MakeNetworkWorld> {
 protected:
  std::unique_ptr<NetworkWorld> make(int32_t world_size) { return GetParam()(world_size); }
};

TEST_P(NetworkSuite, AWindowMayBeSentBeforeAnythingIsReceived) {
  auto world = make(2);
  std::vector<std::byte> data(NetworkWorld::kWindowBytes);
  for (int round = 0; round < 20; ++round) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = stream_byte(0, 1, Lane::kCollective, i + round);
    size_t sent = 0;
    ASSERT_TRUE(eventually([&] {
      sent += world->rank(0).try_send(1, Lane::kCollective, std::span<const std::byte>(data).subspan(sent));
      return sent == data.size();
    })) << sent;
    std::vector<std::byte> received(data.size());
    size_t taken = 0;
    ASSERT_TRUE(eventually([&] {
      taken += world->rank(1).try_receive(0, Lane::kCollective, std::span(received).subspan(taken));
      return taken == received.size();
    })) << taken;
    EXPECT_EQ(received, data);
  }
}

TEST_P(NetworkSuite, AFailureReachesEveryPeerInItsOwnWords) {
  auto world = make(3);
  world->rank(1).tell_state(RankState::kFailed, "out of \n luck");
  for (const int32_t rank : {0, 2}) {
    ASSERT_TRUE(eventually([&] { return world->rank(rank).liveness().state_of(1).state == RankState::kFailed; }));
    EXPECT_EQ(world->rank(rank).liveness().state_of(1).failure, "out of   luck");
    EXPECT_GT(world->rank(rank).liveness().state_changes(), 0U);
    std::byte data{};
    try {
      world->rank(rank).try_receive(1, Lane::kCollective, {&data, 1});
      FAIL();
    } catch (const c10::DistNetworkError& error) {
      const std::string expected = std::string(world->rank(rank).name()) + " transport: rank 1 failed: out of   luck";
      EXPECT_STREQ(error.what_without_backtrace(), expected.c_str());
    }
  }
}

TEST_P(NetworkSuite, AVanishedPeerIsLostForAllOthersAndNobodyElseIs) {
  auto world = make(3);
  world->vanish(1);
  for (const int32_t rank : {0, 2}) {
    EXPECT_TRUE(eventually([&] {
      world->rank(rank).ask_for_life({1});
      return world->rank(rank).liveness().state_of(1).is_lost;
    }));
    EXPECT_FALSE(world->rank(rank).liveness().state_of(2 - rank).is_lost);
  }
  const std::byte data{5};
  EXPECT_EQ(world->rank(0).try_send(2, Lane::kCollective, {&data, 1}), 1U);
}

TEST_P(NetworkSuite, LivingPeersAnswerWhoeverAsks) {
  auto world = make(2);
  world->rank(0).ask_for_life({1});
  EXPECT_TRUE(eventually([&] { return world->rank(0).liveness().silent_for(std::chrono::milliseconds(0)).empty(); }));
}

TEST_P(NetworkSuite, WhoIsAskedSaysForWhomItWaitsForAsLongAsItDoes) {
  auto world = make(3);
  const std::vector<int32_t> known{0, 2};
  WaitingCall call;
  call.fill(std::byte{7});
  const auto ask = [&](Lane lane) {
    world->rank(0).ask_for_life({1});
    return world->rank(0).liveness().waits_of(1, lane);
  };
  EXPECT_TRUE(eventually([&] {
    world->rank(1).liveness().note_wait(Lane::kCollective, known, call);
    world->rank(1).liveness().note_wait(Lane::kPointToPoint, {2});
    // An answer may fall between the two notes, so both lanes are asked for until one answer has both.
    return ask(Lane::kCollective) == known && ask(Lane::kPointToPoint) == std::vector<int32_t>{2};
  }));
  EXPECT_EQ(world->rank(0).liveness().waiting_call_of(1), call);
  EXPECT_EQ(world->rank(0).liveness().waiting_call_of(2), std::nullopt);
  EXPECT_TRUE(world->rank(0).liveness().waits_of(2, Lane::kCollective).empty());
  EXPECT_TRUE(eventually([&] { return ask(Lane::kCollective).empty() && ask(Lane::kPointToPoint).empty(); }));
}

TEST_P(NetworkSuite, WhatARankSaidOfItsWaitsIsNotBelievedOnceItIsSilent) {
  auto world = make(2);
  EXPECT_TRUE(eventually([&] {
    world->rank(1).liveness().note_wait(Lane::kCollective, {0});
    world->rank(0).ask_for_life({1});
    return !world->rank(0).liveness().waits_of(1, Lane::kCollective).empty();
  }));
  EXPECT_TRUE(
      eventually([&] { return world->rank(0).liveness().waits_of(1, Lane::kCollective).empty(); }));  // nobody asks
}

}  // namespace zeropg

#include "backend/bootstrap/sockets/tcp_connector.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <random>
#include <thread>

#include "backend/transport/network/tcp_wire.h"
#include "tests/backend/transport/network/remote_transport_suite.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

// The doors of ranks on one machine.
struct Doors {
  explicit Doors(int32_t world_size) : listeners(world_size), addresses(world_size) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      listeners[rank] = listen_tcp({}, &addresses[rank].port);
      addresses[rank].network_id = "here";
      addresses[rank].hosts = {"127.0.0.1"};
    }
  }
  std::unique_ptr<TcpConnector> open(int32_t rank, const std::string& key = "key",
                                     milliseconds patience = milliseconds(20'000)) {
    ConnectorPlan plan{.own = {.rank = rank, .group = "group", .key = key},
                       .network_id = "here",
                       .addresses = addresses,
                       .callers = {},
                       .patience = patience};
    for (int32_t peer = 0; peer < static_cast<int32_t>(addresses.size()); ++peer) {
      if (peer != rank) plan.callers.push_back(peer);
    }
    return std::make_unique<TcpConnector>(std::move(listeners[rank]), std::move(plan));
  }

  std::vector<Descriptor> listeners;
  std::vector<TcpAddress> addresses;
};

class OnDemandWorld : public NetworkWorld {
 public:
  OnDemandWorld(int32_t world_size, bool has_tags) : doors_(world_size) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      add(std::make_unique<TcpWire>(doors_.open(rank), WireOptions{.rank = rank,
                                                                   .world_size = world_size,
                                                                   .peers = {},
                                                                   .library_root = {},
                                                                   .authenticates_frames = has_tags}),
          world_size);
    }
  }

 private:
  Doors doors_;
};

// One where everybody has met everybody.
class MetWorld final : public OnDemandWorld {
 public:
  MetWorld(int32_t world_size, bool has_tags) : OnDemandWorld(world_size, has_tags) { greet(); }
};

template <typename World, bool has_tags>
std::unique_ptr<World> make_met(int32_t world_size) {
  return std::make_unique<MetWorld>(world_size, has_tags);
}

INSTANTIATE_TEST_SUITE_P(OnDemand, TransportSuite,
                         ::testing::Values(make_met<TransportWorld, false>, make_met<TransportWorld, true>));
INSTANTIATE_TEST_SUITE_P(OnDemand, NetworkSuite,
                         ::testing::Values(make_met<NetworkWorld, false>, make_met<NetworkWorld, true>));

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string receive(RemoteTransport& transport, int32_t peer, size_t bytes) {
  std::string text(bytes, '\0');
  size_t moved = 0;
  while (moved < bytes) {
    moved += transport.try_receive(peer, Lane::kCollective, std::as_writable_bytes(std::span(text)).subspan(moved));
  }
  return text;
}

void send(RemoteTransport& transport, int32_t peer, std::string_view text) {
  size_t moved = 0;
  while (moved < text.size()) moved += transport.try_send(peer, Lane::kCollective, bytes_of(text).subspan(moved));
}

TEST(OnDemand, WhoHasSomethingToSayCallsAndNobodyElse) {
  OnDemandWorld world(4, /*has_tags=*/true);
  send(world.rank(0), 2, "hello");
  EXPECT_EQ(receive(world.rank(2), 0, 5), "hello");
  send(world.rank(2), 0, "good evening");
  EXPECT_EQ(receive(world.rank(0), 2, 12), "good evening");
  EXPECT_TRUE(world.rank(0).delivery_to(2));
  EXPECT_TRUE(world.rank(2).delivery_to(0));
  EXPECT_FALSE(world.rank(0).delivery_to(1));
  EXPECT_FALSE(world.rank(3).delivery_to(0));
}

// All pairs at once, from both ends, with pauses that differ from round to round.
TEST(OnDemand, TwoThatCallEachOtherKeepOneConnection) {
  std::mt19937 random(3);
  for (int round = 0; round < 40; ++round) {
    constexpr int32_t kRanks = 5;
    OnDemandWorld world(kRanks, round % 2 == 0);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank, pause = random() % 300] {
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
        for (int32_t step = 1; step < kRanks; ++step) {
          send(world.rank(rank), (rank + step) % kRanks, std::string(1000, static_cast<char>('a' + rank)));
        }
        for (int32_t step = 1; step < kRanks; ++step) {
          const int32_t peer = (rank + step) % kRanks;
          EXPECT_EQ(receive(world.rank(rank), peer, 1000), std::string(1000, static_cast<char>('a' + peer)));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(OnDemand, WhoIsMetLaterHearsThatARankHasLeft) {
  OnDemandWorld world(3, false);
  world.rank(1).tell_state(RankState::kDeparted);
  world.rank(0).ask_for_life({1});
  EXPECT_TRUE(eventually([&] { return world.rank(0).liveness().is_gone(1); }));
  EXPECT_EQ(world.rank(0).liveness().why_gone(1), "rank 1 left the group");
  EXPECT_FALSE(world.rank(2).delivery_to(1));
}

TEST(OnDemand, AFailureIsToldToAll) {
  OnDemandWorld world(4, false);
  world.rank(1).tell_state(RankState::kFailed, "no memory");
  for (const int32_t rank : {0, 2, 3}) {
    EXPECT_TRUE(eventually([&] { return world.rank(rank).liveness().is_gone(1); }));
    EXPECT_EQ(world.rank(rank).liveness().why_gone(1), "rank 1 failed: no memory");
  }
}

TEST(OnDemand, WhoLeftBeforeItWasCalledHasLeft) {
  OnDemandWorld world(2, false);
  world.depart(1);
  const auto start = Clock::now();
  try {
    send(world.rank(0), 1, "too late");
    FAIL();
  } catch (const c10::DistNetworkError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("rank 1 left the group"), std::string::npos) << text;
  }
  EXPECT_LT(Clock::now() - start, milliseconds(5'000));
}

std::unique_ptr<TcpWire> wire_of(Doors& doors, int32_t rank) {
  return std::make_unique<TcpWire>(
      doors.open(rank),
      WireOptions{.rank = rank, .world_size = 2, .peers = {}, .library_root = {}, .authenticates_frames = true});
}

RemoteTransportOptions options_of(int32_t rank) {
  return {.rank = rank, .world_size = 2, .peers = {1 - rank}, .window_bytes = 8192};
}

// Rank 0 of two, which calls rank 1 and believes in its connection first.
struct Believer {
  explicit Believer(Doors& doors) : transport(wire_of(doors, 0), options_of(0)) {}

  template <typename Step>
  bool comes_to_believe(const Step& step) {
    transport.greet({1});
    return eventually([&] {
      transport.progress();
      if (transport.delivery_to(1)) return true;
      step();
      return false;
    });
  }
  std::string how_it_ends() {
    const bool has_ended = eventually([&] {
      transport.progress();
      return transport.liveness().is_gone(1);
    });
    return has_ended ? transport.liveness().why_gone(1) : "it does not";
  }

  RemoteTransport transport;
};

// It has sent its proof, and goes before it sees the caller's last byte.
TEST(OnDemand, WhoLeavesInTheMiddleOfACallHasLeft) {
  Doors doors(2);
  auto listener = doors.open(1);
  Believer caller(doors);
  size_t met = 0;
  ASSERT_TRUE(caller.comes_to_believe([&] { met += listener->advance().made.size(); }));
  ASSERT_EQ(met, 0U);
  listener.reset();
  EXPECT_EQ(caller.how_it_ends(), "rank 1 left the group");
}

TEST(OnDemand, WhoGoesWithoutGoodbyeOnceItIsMetIsLost) {
  Doors doors(2);
  auto listener = std::make_unique<RemoteTransport>(wire_of(doors, 1), options_of(1));
  Believer caller(doors);
  ASSERT_TRUE(caller.comes_to_believe([&] { listener->progress(); }));
  ASSERT_TRUE(eventually([&] {
    listener->progress();
    caller.transport.progress();
    return caller.transport.liveness().silent_for(milliseconds(0)).empty();
  }));
  listener.reset();
  EXPECT_EQ(caller.how_it_ends(), "rank 1 is lost: it closed the connection");
}

ConnectorNews news_of(TcpConnector& connector, milliseconds limit = milliseconds(20'000)) {
  const auto deadline = Clock::now() + limit;
  while (Clock::now() < deadline) {
    pollfd entry{connector.descriptor(), POLLIN, 0};
    ::poll(&entry, 1, 50);
    ConnectorNews news = connector.advance();
    if (!news.made.empty() || !news.lost.empty()) return news;
  }
  return {};
}

// Its system lets the call in. As long as it lives it is not lost, however long that is, and then they meet.
TEST(OnDemand, WhoIsStoppedIsCalledUntilItGoesOn) {
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"127.0.0.1"}, {"127.0.0.1", "127.0.0.2"}}) {
    Doors doors(2);
    doors.addresses[1].hosts = hosts;
    auto caller = doors.open(0, "key", milliseconds(300));
    caller->call(1);
    EXPECT_TRUE(news_of(*caller, milliseconds(5'000)).lost.empty());
    auto stopped = doors.open(1);  // it looks for the first time
    std::atomic<bool> is_over = false;
    size_t met = 0;
    std::thread host([&] {
      while (!is_over) met += news_of(*stopped, milliseconds(20)).made.size();
    });
    EXPECT_EQ(news_of(*caller).made.size(), 1U);
    std::this_thread::sleep_for(milliseconds(100));
    is_over = true;
    host.join();
    EXPECT_EQ(met, 1U);
  }
}

// Where the listener waits for the last byte of a stopped caller.
TEST(OnDemand, ACallerThatIsStoppedInTheMiddleGoesOn) {
  Doors doors(2);
  auto caller = doors.open(0);
  auto listener = doors.open(1);
  caller->call(1);
  const auto both = [&](milliseconds limit, bool caller_runs) {
    size_t made = 0;
    for (const auto end = Clock::now() + limit; Clock::now() < end;) {
      if (caller_runs) made += caller->advance().made.size();
      made += listener->advance().made.size();
      std::this_thread::sleep_for(milliseconds(1));
    }
    return made;
  };
  // Three rounds: connected, the nonce, the proof.
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(both(milliseconds(20), /*caller_runs=*/false), 0U);
    caller->advance();
  }
  EXPECT_EQ(both(milliseconds(11'000), /*caller_runs=*/false), 0U);
  EXPECT_EQ(both(milliseconds(200), /*caller_runs=*/true), 2U);
}

TEST(OnDemand, WhoCannotBeReachedIsLostWhenPatienceEnds) {
  Doors doors(2);
  ::listen(doors.listeners[1].get(), 0);  // a door that is full drops who comes, as some firewalls do
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 4; ++i) strangers.push_back(connect_tcp("127.0.0.1", doors.addresses[1].port));
  std::this_thread::sleep_for(milliseconds(50));
  auto connector = doors.open(0, "key", milliseconds(700));
  connector->call(1);
  const ConnectorNews news = news_of(*connector);
  ASSERT_EQ(news.lost.size(), 1U);
  EXPECT_FALSE(news.lost[0].has_left);
  EXPECT_NE(news.lost[0].reason.find("no answer"), std::string::npos) << news.lost[0].reason;
}

TEST(OnDemand, AnotherSecretIsRefusedAndStrangersStayOutside) {
  Doors doors(3);
  const uint16_t port = doors.addresses[0].port;
  auto honest = doors.open(0);
  auto wrong = doors.open(1, "wrong");
  auto right = doors.open(2);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(connect_tcp("127.0.0.1", port));
  std::atomic<bool> is_over = false;
  std::vector<int32_t> met;
  std::thread host([&] {
    while (!is_over) {
      pollfd entry{honest->descriptor(), POLLIN, 0};
      ::poll(&entry, 1, 5);
      for (const ConnectorNews::Made& made : honest->advance().made) met.push_back(made.peer);
    }
  });
  wrong->call(0);
  const ConnectorNews refused = news_of(*wrong);
  ASSERT_EQ(refused.lost.size(), 1U);
  EXPECT_NE(refused.lost[0].reason.find("ZEROPG_SECRET"), std::string::npos) << refused.lost[0].reason;
  right->call(0);
  const ConnectorNews made = news_of(*right);
  ASSERT_EQ(made.made.size(), 1U);
  std::this_thread::sleep_for(milliseconds(50));
  is_over = true;
  host.join();
  EXPECT_EQ(met, std::vector<int32_t>{2});
}

}  // namespace
}  // namespace zeropg

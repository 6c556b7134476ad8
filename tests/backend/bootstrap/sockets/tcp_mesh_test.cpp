#include "backend/bootstrap/sockets/tcp_mesh.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "backend/bootstrap/sockets/authentication.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

struct Node {
  Descriptor listener;
  TcpAddress address;
  Node() {
    listener = listen_tcp({}, &address.port);
    address.network_id = "here";
    address.hosts = {"127.0.0.1"};
  }
};

// Ranks call those of lower rank.
ConnectorPlan plan_for(int32_t rank, const std::vector<Node>& nodes, const std::string& key = "key") {
  ConnectorPlan plan{
      .own = {.rank = rank, .group = "group", .key = key}, .network_id = "here", .addresses = {}, .callers = {}};
  for (int32_t peer = 0; peer < static_cast<int32_t>(nodes.size()); ++peer) {
    plan.addresses.push_back(nodes[peer].address);
    if (peer > rank) plan.callers.push_back(peer);
  }
  return plan;
}

std::string connect(Node& node, const ConnectorPlan& plan, std::vector<PeerConnection>* connections,
                    milliseconds limit = milliseconds(20'000)) {
  std::vector<int32_t> to;
  for (int32_t peer = 0; peer < plan.own.rank; ++peer) to.push_back(peer);
  try {
    *connections =
        connect_mesh(std::move(node.listener), plan, to, Clock::now() + limit, [](const std::vector<int32_t>&) {});
    return "";
  } catch (const c10::DistError& error) {
    return error.what_without_backtrace();
  }
}

void expect_pair(const PeerConnection& one, const PeerConnection& other, char byte) {
  EXPECT_EQ(one.key, other.key);
  EXPECT_EQ(::send(one.socket.get(), &byte, 1, 0), 1);
  char heard = 0;
  while (::recv(other.socket.get(), &heard, 1, 0) < 0) {
  }
  EXPECT_EQ(heard, byte);
}

Descriptor dial(const Node& node) {
  Descriptor socket = connect_tcp("127.0.0.1", node.address.port);
  pollfd entry{socket.get(), POLLOUT, 0};
  ::poll(&entry, 1, 1000);
  return socket;
}

TEST(TcpMesh, ConnectsEverybodyWithEverybody) {
  std::vector<Node> nodes(4);
  std::vector<std::vector<PeerConnection>> connections(4);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] { EXPECT_EQ(connect(nodes[rank], plan_for(rank, nodes), &connections[rank]), ""); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(connections[0][1].key, connections[0][2].key);
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(connections[rank][rank].socket);
    for (int32_t peer = 0; peer < rank; ++peer) {
      expect_pair(connections[rank][peer], connections[peer][rank], static_cast<char>(rank * 4 + peer + 1));
    }
  }
}

TEST(TcpMesh, StrangersDoNotHarmTheGroup) {
  std::vector<Node> nodes(2);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(dial(nodes[0]));
    if (i % 4 == 0) continue;                                                             // silent
    std::string bytes(i % 4 == 1 ? 3 : i % 4 == 2 ? 68 : 100'000, static_cast<char>(i));  // short, wrong, endless
    ::send(strangers.back().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  std::vector<PeerConnection> first;
  std::vector<PeerConnection> second;
  const auto start = Clock::now();
  std::thread thread([&] { EXPECT_EQ(connect(nodes[0], plan_for(0, nodes), &first), ""); });
  EXPECT_EQ(connect(nodes[1], plan_for(1, nodes), &second), "");
  thread.join();
  EXPECT_LT(Clock::now() - start, milliseconds(10'000));
  expect_pair(first[1], second[0], 'x');
}

TEST(TcpMesh, AnotherSecretIsToldBeforeTheDeadline) {
  std::vector<Node> nodes(2);
  std::vector<PeerConnection> none;
  std::thread thread([&] {
    const std::string error = connect(nodes[0], plan_for(0, nodes), &none, milliseconds(5'000));
    EXPECT_NE(error.find("rank 1 did not connect"), std::string::npos) << error;
    EXPECT_NE(error.find("1 connections did not prove the group's secret"), std::string::npos) << error;
  });
  std::vector<PeerConnection> others;
  const std::string error = connect(nodes[1], plan_for(1, nodes, "wrong"), &others);
  EXPECT_NE(error.find("did not take this rank's proof of the group's secret"), std::string::npos) << error;
  EXPECT_NE(error.find("ZEROPG_SECRET"), std::string::npos) << error;
  thread.join();
}

// Who listens at a rank's port without the secret learns nothing and is not believed.
TEST(TcpMesh, AnImpostorIsNotBelievedAndAReplayIsRefused) {
  std::vector<Node> nodes(2);
  std::string recorded;
  std::thread impostor([&] {
    Descriptor victim;
    while (!victim) victim = accept_tcp(nodes[0].listener);
    const Nonce nonce = random_nonce();
    ::send(victim.get(), nonce.data(), nonce.size(), MSG_NOSIGNAL);
    char buffer[200];
    while (recorded.size() < 68) {
      const ssize_t received = ::recv(victim.get(), buffer, sizeof buffer, 0);
      if (received > 0) recorded.append(buffer, static_cast<size_t>(received));
    }
    const std::string lie(32, 'x');
    ::send(victim.get(), lie.data(), lie.size(), MSG_NOSIGNAL);
    while (::recv(victim.get(), buffer, sizeof buffer, 0) < 0 && errno == EAGAIN) {
    }
  });
  std::vector<PeerConnection> none;
  const std::string error = connect(nodes[1], plan_for(1, nodes), &none);
  EXPECT_NE(error.find("it did not prove the group's secret"), std::string::npos) << error;
  impostor.join();

  const Descriptor replay = dial(nodes[0]);
  ::send(replay.get(), recorded.data(), recorded.size(), MSG_NOSIGNAL);
  const std::string refused = connect(nodes[0], plan_for(0, nodes), &none, milliseconds(5'000));
  EXPECT_NE(refused.find("did not prove"), std::string::npos) << refused;
}

TEST(TcpMesh, WhoCannotBeReachedIsNamedWithTheAddressTried) {
  std::vector<Node> nodes(2);
  // Bound, so that no other program listens there, but without a listener.
  nodes[0].listener.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in loopback{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  auto* bound = reinterpret_cast<sockaddr*>(&loopback);
  socklen_t bytes = sizeof loopback;
  ASSERT_EQ(::bind(nodes[0].listener.get(), bound, bytes), 0);
  ASSERT_EQ(::getsockname(nodes[0].listener.get(), bound, &bytes), 0);
  nodes[0].address.port = ntohs(loopback.sin_port);
  std::vector<PeerConnection> none;
  const std::string error = connect(nodes[1], plan_for(1, nodes), &none, milliseconds(2000));
  EXPECT_NE(error.find("rank 0 was not reached (127.0.0.1 port "), std::string::npos) << error;
  EXPECT_NE(error.find("refused"), std::string::npos) << error;
}

TEST(TcpSocket, LoopbackLeadsOnlyToThisMachine) {
  TcpAddress address{.port = 1, .network_id = "there", .hosts = {"10.99.98.97", "127.0.0.1", "::1"}};
  EXPECT_EQ(candidates(address, "here"), (std::vector<std::string>{"10.99.98.97"}));
  address.network_id = "here";
  EXPECT_EQ(candidates(address, "here").size(), 3U);
}

TEST(TcpSocket, DamagedAddressesAreRefused) {
  const TcpAddress address{.port = 77, .network_id = "here", .hosts = {"10.0.0.1", "fd00::1"}};
  const TcpAddress decoded = decode_tcp_address(encode(address));
  EXPECT_EQ(decoded.port, 77);
  EXPECT_EQ(decoded.hosts, address.hosts);
  for (const char* text :
       {"", "77", "0\nhere\n10.0.0.1", "99999\nhere", "7x\nhere", "77\nhere\nexample.org", "-1\nx"}) {
    EXPECT_THROW(decode_tcp_address(text), c10::DistBackendError) << text;
  }
}

TEST(Listeners, ShareARangeOfPortsUntilItIsFull) {
  PortRange two{};
  uint16_t ports[2] = {};
  Descriptor listeners[2];
  for (int attempt = 0; !listeners[1] && attempt < 100; ++attempt) {  // other programs take ports as well
    listeners[0].reset();
    uint16_t free_just_now = 0;
    listen_tcp({}, &free_just_now);
    two = {static_cast<uint16_t>(free_just_now - 1), free_just_now};
    try {
      for (int i = 0; i < 2; ++i) listeners[i] = listen_tcp(two, &ports[i]);
    } catch (const c10::DistBackendError&) {
    }
  }
  ASSERT_TRUE(listeners[1]);
  EXPECT_EQ(ports[0] + ports[1], two.first + two.last);
  uint16_t none = 0;
  try {
    listen_tcp(two, &none);
    FAIL();
  } catch (const c10::DistBackendError& error) {
    EXPECT_NE(error.what_without_backtrace(), nullptr);
    EXPECT_NE(std::string(error.what_without_backtrace()).find("ZEROPG_PORTS"), std::string::npos);
  }
}

}  // namespace
}  // namespace zeropg

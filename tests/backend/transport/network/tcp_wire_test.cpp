#include "backend/transport/network/tcp_wire.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/backend/child_process.h"
#include "tests/backend/transport/network/remote_transport_suite.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

// Two ends of a TCP connection over loopback.
std::pair<Descriptor, Descriptor> tcp_pair() {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes);
  ::listen(listener.get(), 1);
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes);
  Descriptor one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(one.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ::fcntl(one.get(), F_SETFL, O_NONBLOCK);
  return {std::move(one), Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))};
}

// By peer, as a rank of a group where every pair has another key.
std::vector<FrameKeys> keys_of(int32_t rank, int32_t world_size, const std::string& key = "key") {
  std::vector<FrameKeys> keys;
  for (int32_t peer = 0; peer < world_size; ++peer) {
    keys.push_back(frame_keys(key + std::to_string(std::min(rank, peer)) + "<" + std::to_string(std::max(rank, peer)),
                              rank, peer));
  }
  return keys;
}

class TcpWorld final : public NetworkWorld {
 public:
  TcpWorld(int32_t world_size, bool has_tags) {
    std::vector<std::vector<Descriptor>> connections(world_size);
    for (auto& of_rank : connections) of_rank.resize(world_size);
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (int32_t peer = 0; peer < rank; ++peer) {
        std::tie(connections[rank][peer], connections[peer][rank]) = tcp_pair();
      }
    }
    for (int32_t rank = 0; rank < world_size; ++rank) {
      add(std::make_unique<TcpWire>(std::move(connections[rank]),
                                    has_tags ? keys_of(rank, world_size) : std::vector<FrameKeys>()),
          world_size);
    }
  }
};

template <typename World, bool has_tags>
std::unique_ptr<World> make_tcp(int32_t world_size) {
  return std::make_unique<TcpWorld>(world_size, has_tags);
}

INSTANTIATE_TEST_SUITE_P(Tcp, TransportSuite,
                         ::testing::Values(make_tcp<TransportWorld, false>, make_tcp<TransportWorld, true>));
INSTANTIATE_TEST_SUITE_P(Tcp, NetworkSuite,
                         ::testing::Values(make_tcp<NetworkWorld, false>, make_tcp<NetworkWorld, true>));

// A network whose one peer is this test, which writes what it likes.
struct Victim {
  Descriptor attacker;
  std::unique_ptr<RemoteTransport> network;

  Victim() {
    std::vector<Descriptor> connections(2);
    std::tie(attacker, connections[1]) = tcp_pair();
    ::fcntl(attacker.get(), F_SETFL, 0);
    network = std::make_unique<RemoteTransport>(
        std::make_unique<TcpWire>(std::move(connections)),
        RemoteTransportOptions{.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = 4096});
  }
  void write(const void* data, size_t bytes) { ::send(attacker.get(), data, bytes, MSG_NOSIGNAL); }
  RemoteState after(std::chrono::milliseconds limit = milliseconds(60'000)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (network->liveness().state_of(1).state == RankState::kAlive && !network->liveness().state_of(1).is_lost &&
           std::chrono::steady_clock::now() < deadline) {
      network->progress();
    }
    return network->liveness().state_of(1);
  }
};

TEST(TcpWire, FramesThatMakeNoSenseLoseThePeerAndNothingElse) {
  const FrameHeader lies[] = {
      {static_cast<FrameKind>(0), 0, 0, 0, 0},
      {static_cast<FrameKind>(200), 0, 0, 0, 0},
      {FrameKind::kData, kStreamCount, 0, 10, 0},
      {FrameKind::kData, 0, 0, 0xffffffff, 0},
      {FrameKind::kData, 0, 0, kMaxPayloadBytes, 0},  // within a frame's limit, beyond the window's
      {FrameKind::kCredit, 0, 0, 0, 1},               // for bytes that were not sent
      {FrameKind::kCredit, 7, 0, 0, 0},
      {FrameKind::kCredit, 0, 0, 8, 0},
      {FrameKind::kState, 0, 0, 100'000, 2},
      {FrameKind::kPing, 0, 0, 1, 0},
  };
  for (const FrameHeader& lie : lies) {
    Victim victim;
    victim.write(&lie, sizeof lie);
    const RemoteState state = victim.after();
    EXPECT_TRUE(state.is_lost) << static_cast<int>(lie.kind) << " " << lie.payload_bytes;
    EXPECT_NE(state.loss.find("as no zeropg of this version does"), std::string::npos) << state.loss;
  }
}

TEST(TcpWire, SurvivesRandomBytes) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    Victim victim;
    std::vector<uint32_t> noise(random() % 3000 + 1);
    for (uint32_t& word : noise) word = random() % 3 == 0 ? random() % 9 : random();
    victim.write(noise.data(), noise.size() * sizeof(uint32_t));
    victim.attacker.reset();
    const RemoteState state = victim.after();  // among the noise there may be a word that it failed
    EXPECT_TRUE(state.is_lost || state.state != RankState::kAlive);
  }
}

int send_buffer_of(const Descriptor& socket) {
  int bytes = 0;
  socklen_t size = sizeof bytes;
  EXPECT_EQ(::getsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, &size), 0);
  return bytes;
}

TEST(TcpSendBuffer, IsShortWhereThePeerIsNear) {
  const auto [one, other] = tcp_pair();
  const int none = 0;
  if (::setsockopt(one.get(), SOL_SOCKET, SO_BUF_LOCK, &none, sizeof none) != 0) GTEST_SKIP() << "before Linux 5.14";
  TcpSendBuffer buffer;
  buffer.adopt(one.get());
  EXPECT_TRUE(buffer.is_short());
  EXPECT_EQ(send_buffer_of(one), TcpSendBuffer::kShortBytes);
  EXPECT_GT(send_buffer_of(other), TcpSendBuffer::kShortBytes);
}

TEST(TcpSendBuffer, IsTheKernelsWhereItSaysNothingOfTheWay) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const Descriptor one(ends[0]), other(ends[1]);
  TcpSendBuffer buffer;
  buffer.adopt(one.get());
  EXPECT_FALSE(buffer.is_short());
}

TEST(ShortBufferRule, BlamesTheBufferWhenItHeldUpMuchForLong) {
  ShortBufferRule rule;
  milliseconds busy(0), limited(0);
  const auto take = [&](int more_busy, int more_limited) {
    return rule.take(busy += milliseconds(more_busy), limited += milliseconds(more_limited));
  };
  for (int window = 0; window < 10; ++window) EXPECT_FALSE(take(500, 100));
  EXPECT_FALSE(take(500, 300));  // once is nothing
  EXPECT_FALSE(take(500, 100));
  for (int look = 0; look < 4; ++look) EXPECT_FALSE(take(100, 100));  // too little to tell
  EXPECT_FALSE(take(100, 100));
  EXPECT_TRUE(take(600, 200));
}

// As a thread does that waits for an operation, and beside which the progress thread keeps away.
TEST(TcpWire, WhoReadsFromOnePeerSendsWhatWaitsForOthers) {
  constexpr int64_t kWindow = 4 << 20;
  std::vector<Descriptor> of_sender(3), of_receiver(3), of_other(3);
  std::tie(of_sender[1], of_receiver[0]) = tcp_pair();
  std::tie(of_sender[2], of_other[0]) = tcp_pair();
  RemoteTransport sender(std::make_unique<TcpWire>(std::move(of_sender)),
                         {.rank = 0, .world_size = 3, .peers = {1, 2}, .window_bytes = kWindow});
  RemoteTransport receiver(std::make_unique<TcpWire>(std::move(of_receiver)),
                           {.rank = 1, .world_size = 3, .peers = {0}, .window_bytes = kWindow});
  const std::vector<std::byte> data(kWindow, std::byte{7});
  size_t sent = 0, received = 0;
  std::vector<std::byte> taken(data.size());
  const auto take = [&] { received += receiver.try_receive(0, Lane::kCollective, std::span(taken).subspan(received)); };
  bool had_unsent = false;
  for (; sent < data.size(); take()) {  // until the socket has taken the last bytes only in part, if need be
    sent += sender.try_send(1, Lane::kCollective, std::span<const std::byte>(data).subspan(sent));
    had_unsent |= sender.has_unfinished();
  }
  EXPECT_TRUE(had_unsent);
  std::byte nothing[1];
  EXPECT_TRUE(eventually([&] {
    sender.try_receive(2, Lane::kCollective, nothing);
    take();
    return received == data.size();
  })) << received;
  EXPECT_EQ(taken, data);
  EXPECT_FALSE(sender.has_unfinished());
}

TEST(TcpWire, AKilledProcessIsLostAlsoWhenItsChildrenLiveOn) {
  auto [here, there] = tcp_pair();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(here);
  RemoteTransport network(std::make_unique<TcpWire>(std::move(connections)),
                          {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = 4096});
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const Descriptor reader(ends[0]);
  Descriptor writer(ends[1]);
  ChildProcess child([&] {
    writer.reset();
    std::vector<Descriptor> own(2);
    own[0] = std::move(there);
    const RemoteTransport peer(std::make_unique<TcpWire>(std::move(own)),
                               {.rank = 1, .world_size = 2, .peers = {0}, .window_bytes = 4096});
    if (::fork() == 0) {  // as a data loader's worker; lives until this test ends
      ::alarm(60);
      char byte = 0;
      static_cast<void>(!::read(reader.get(), &byte, 1));
      ::_exit(0);
    }
    std::this_thread::sleep_for(milliseconds(100));
    ::kill(::getpid(), SIGKILL);
    return false;
  });
  there.reset();
  const auto start = std::chrono::steady_clock::now();
  while (!network.liveness().state_of(1).is_lost) {
    network.progress();
    std::this_thread::sleep_for(milliseconds(1));
    ASSERT_LT(std::chrono::steady_clock::now() - start, milliseconds(20'000));
  }
  EXPECT_FALSE(child.succeeded());
}

// As a process that is stopped: its system takes what fits, and then answers that there is no room.
TEST(TcpWire, APeerThatTakesNothingIsNotLost) {
  auto [silent, here] = tcp_pair();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(here);
  constexpr int64_t kWindow = 64 << 20;
  RemoteTransport network(
      std::make_unique<TcpWire>(std::move(connections), std::vector<FrameKeys>(), milliseconds(600)),
      {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = kWindow});
  const std::vector<std::byte> data(1 << 20);
  size_t sent = 0;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < milliseconds(3000)) {
    sent += network.try_send(1, Lane::kCollective, data);
    network.progress();
    network.ask_for_life({1});
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_LT(sent, static_cast<size_t>(kWindow)) << "there was room for all of it";
  EXPECT_FALSE(network.liveness().state_of(1).is_lost) << network.liveness().state_of(1).loss;
}

// Its system answers with a reset, after which the kernel counts what was sent as unacknowledged for ever.
TEST(TcpWire, CloseDoesNotWaitForAPeerThatIsGone) {
  auto [there, here] = tcp_pair();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(here);
  RemoteTransport network(std::make_unique<TcpWire>(std::move(connections)),
                          {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = 4096});
  there.reset();
  const std::vector<std::byte> data(64);
  network.try_send(1, Lane::kCollective, data);
  std::this_thread::sleep_for(milliseconds(50));  // until the answer is here
  const auto start = std::chrono::steady_clock::now();
  network.close(milliseconds(5000));
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2000));
}

TEST(TcpWire, SaysWhatHasArrivedAndHowLongItTook) {
  auto [there, here] = tcp_pair();
  std::vector<Descriptor> connections(2);
  connections[1] = std::move(here);
  TcpWire wire(std::move(connections));
  if (!wire.delivery_to(1)) GTEST_SKIP() << "this kernel does not count it";
  EXPECT_FALSE(wire.delivery_to(0)) << "no peer";
  const Delivery before = *wire.delivery_to(1);
  const std::vector<std::byte> data(10'000);
  const FrameHeader header{FrameKind::kData, 0, 0, static_cast<uint32_t>(data.size()), 0};
  ASSERT_TRUE(wire.send(1, header, data, Urgency::kMustTake));
  const auto end = std::chrono::steady_clock::now() + milliseconds(20'000);
  while (wire.delivery_to(1)->bytes < before.bytes + sizeof header + data.size()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(wire.delivery_to(1)->bytes, before.bytes + sizeof header + data.size());
  EXPECT_LT(wire.delivery_to(1)->busy - before.busy, milliseconds(20'000));
}

// Rank 0 and its peer, with somebody between them who sees every byte from the peer before rank 0 does.
struct Tapped {
  std::unique_ptr<RemoteTransport> networks[2];
  Descriptor ends[2];
  size_t tag_bytes;

  explicit Tapped(bool has_tags, const std::string& key = "key") : tag_bytes(has_tags ? 2 * sizeof(Tag) : 0) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      std::vector<Descriptor> connections(2);
      std::tie(ends[rank], connections[1 - rank]) = tcp_pair();
      networks[rank] = std::make_unique<RemoteTransport>(
          std::make_unique<TcpWire>(std::move(connections),
                                    has_tags ? keys_of(rank, 2, key) : std::vector<FrameKeys>()),
          RemoteTransportOptions{.rank = rank, .world_size = 2, .peers = {1 - rank}, .window_bytes = 1 << 20});
    }
  }
  // What the peer sends for these bytes of a stream.
  std::string recorded(const std::string& data) {
    EXPECT_EQ(networks[1]->try_send(0, Lane::kCollective, std::as_bytes(std::span(data))), data.size());
    return read(ends[1], data.size());
  }
  // The whole frame with a payload of so many bytes.
  std::string read(const Descriptor& end, size_t payload_bytes) const {
    std::string frame(sizeof(FrameHeader) + payload_bytes + tag_bytes, '\0');
    for (size_t filled = 0; filled < frame.size();) {
      const ssize_t received = ::recv(end.get(), frame.data() + filled, frame.size() - filled, MSG_DONTWAIT);
      if (received > 0) filled += static_cast<size_t>(received);
    }
    return frame;
  }
  void pass_on(const std::string& bytes) {
    EXPECT_EQ(::send(ends[0].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // What rank 0 gets, or the error that it has instead.
  std::string heard(size_t bytes) {
    std::string data(bytes, '\0');
    size_t taken = 0;
    try {
      while (taken < bytes) {
        taken += networks[0]->try_receive(1, Lane::kCollective, std::as_writable_bytes(std::span(data)).subspan(taken));
      }
    } catch (const c10::DistNetworkError& error) {
      return error.what_without_backtrace();
    }
    return data;
  }
};

const std::string kWords = "the gradient of this step";
const char* const kNoMatch = "tcp transport: rank 1 is lost: a frame's tag did not match";

TEST(AuthenticFrames, ABitThatWasChangedOnTheWayLosesThePeer) {
  const size_t bytes = sizeof(FrameHeader) + kWords.size() + 2 * sizeof(Tag);
  for (size_t bit = 0; bit < bytes * 8; ++bit) {
    Tapped wire(/*has_tags=*/true);
    std::string frame = wire.recorded(kWords);
    ASSERT_EQ(frame.size(), bytes);
    frame[bit / 8] = static_cast<char>(frame[bit / 8] ^ 1 << bit % 8);
    wire.pass_on(frame);
    EXPECT_EQ(wire.heard(kWords.size()).rfind(kNoMatch, 0), 0U) << bit;
  }
}

TEST(AuthenticFrames, RepeatedReorderedReflectedMissingAndForeignOnesLoseThePeer) {
  const auto last_heard_of = [](const std::function<std::string(Tapped&)>& meddle, size_t frames) {
    Tapped wire(/*has_tags=*/true);
    wire.pass_on(meddle(wire));
    std::string heard;
    for (size_t i = 0; i < frames; ++i) heard = wire.heard(1);
    return heard;
  };
  const auto in_order = [](Tapped& wire) {
    const std::string first = wire.recorded("a");
    return first + wire.recorded("b");
  };
  const auto repeated = [](Tapped& wire) {
    const std::string frame = wire.recorded("a");
    return frame + frame;
  };
  const auto reordered = [](Tapped& wire) {
    const std::string first = wire.recorded("a");
    return wire.recorded("b") + first;
  };
  const auto missing = [](Tapped& wire) {
    wire.recorded("a");
    return wire.recorded("b");
  };
  const auto of_another_connection = [](Tapped&) {
    Tapped other(/*has_tags=*/true, "other");
    return other.recorded("a");
  };
  const auto reflected = [](Tapped& wire) {
    const std::string own = "a";
    wire.networks[0]->try_send(1, Lane::kCollective, std::as_bytes(std::span(own)));
    return wire.read(wire.ends[0], own.size());
  };
  EXPECT_EQ(last_heard_of(in_order, 2), "b");
  EXPECT_EQ(last_heard_of(repeated, 2).rfind(kNoMatch, 0), 0U);
  EXPECT_EQ(last_heard_of(reordered, 1).rfind(kNoMatch, 0), 0U);
  EXPECT_EQ(last_heard_of(missing, 1).rfind(kNoMatch, 0), 0U);
  EXPECT_EQ(last_heard_of(reflected, 1).rfind(kNoMatch, 0), 0U);
  EXPECT_EQ(last_heard_of(of_another_connection, 1).rfind(kNoMatch, 0), 0U);
}

TEST(AuthenticFrames, WithoutTagsAChangedPayloadIsBelieved) {
  Tapped wire(/*has_tags=*/false);
  std::string frame = wire.recorded(kWords);
  frame.back() = 'P';
  wire.pass_on(frame);
  EXPECT_EQ(wire.heard(kWords.size()), kWords.substr(0, kWords.size() - 1) + "P");
}

}  // namespace
}  // namespace zeropg

#include "backend/transport/network/ucx_wire.h"

#include <csignal>

#include "tests/backend/transport/network/remote_transport_suite.h"

namespace zeropg {
namespace {

// Not a real digest: different for different keys, pairs and messages.
Seal test_seal(uint64_t key, int32_t from, int32_t to, std::span<const std::byte> message) {
  uint64_t hash = key * 31 + static_cast<uint64_t>(from) * 7 + static_cast<uint64_t>(to);
  for (const std::byte byte : message) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  Seal seal{};
  std::memcpy(seal.data(), &hash, sizeof hash);
  return seal;
}

struct WireChoice {
  uint64_t key = 1;
  bool authenticates_payloads = true;
  std::string devices = "";
  size_t fetched_bytes = 0;
};

std::unique_ptr<UcxWire> make_wire(int32_t rank, int32_t world_size, const WireChoice& choice = {}) {
  return UcxWire::make(
      {.root = "",
       .rank = rank,
       .world_size = world_size,
       .seal = [key = choice.key](int32_t from, int32_t to,
                                  std::span<const std::byte> message) { return test_seal(key, from, to, message); },
       .authenticates_payloads = choice.authenticates_payloads,
       .devices = choice.devices,
       .fetched_bytes = choice.fetched_bytes});
}

std::string why_there_is_none() {
  try {
    make_wire(0, 1);
    return "";
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
}

class UcxWorld final : public NetworkWorld {
 public:
  explicit UcxWorld(int32_t world_size) {
    std::vector<std::unique_ptr<UcxWire>> wires;
    for (int32_t rank = 0; rank < world_size; ++rank) wires.push_back(make_wire(rank, world_size));
    for (int32_t rank = 0; rank < world_size; ++rank) {
      for (int32_t peer = 0; peer < world_size; ++peer) {
        if (peer != rank) wires[rank]->introduce(peer, wires[peer]->address());
      }
    }
    for (auto& wire : wires) add(std::move(wire), world_size);
    greet();
  }
};

std::unique_ptr<TransportWorld> make_ucx_world(int32_t world_size) { return std::make_unique<UcxWorld>(world_size); }
std::unique_ptr<NetworkWorld> make_ucx_network(int32_t world_size) { return std::make_unique<UcxWorld>(world_size); }

// Without UCX its suites have nothing to run on.
template <typename Make>
std::vector<Make> where_there_is_one(Make make) {
  static const bool is_there = why_there_is_none().empty();
  return is_there ? std::vector<Make>{make} : std::vector<Make>{};
}

INSTANTIATE_TEST_SUITE_P(Ucx, TransportSuite,
                         ::testing::ValuesIn(where_there_is_one<MakeTransportWorld>(make_ucx_world)));
INSTANTIATE_TEST_SUITE_P(Ucx, NetworkSuite,
                         ::testing::ValuesIn(where_there_is_one<MakeNetworkWorld>(make_ucx_network)));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportSuite);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(NetworkSuite);

TEST(UcxWire, SaysWhatToInstallWhereThereIsNone) {
  const std::string reason = why_there_is_none();
  if (!reason.empty()) {
    EXPECT_NE(reason.find("pip install libucx-cu13"), std::string::npos) << reason;
  }
}

std::map<int, sighandler_t> signal_handlers() {
  std::map<int, sighandler_t> handlers;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT, SIGTERM, SIGCHLD, SIGPIPE}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    handlers[signal] = action.sa_handler;
  }
  return handlers;
}

const auto handlers_at_load = signal_handlers();  // the default ones, or a sanitizer's

TEST(UcxWire, SaysWhyDevicesCannotBeUsed) {
  if (machine_has_rdma()) GTEST_SKIP() << "this machine's devices may well be usable";
  EXPECT_EQ(UcxWire::probe_rdma("/nowhere", /*has_device=*/false).obstacle, "");
  const WireProbe probe = UcxWire::probe_rdma("/nowhere", /*has_device=*/true);
  EXPECT_FALSE(probe.is_viable);
  EXPECT_NE(probe.obstacle.find("UCX"), std::string::npos) << probe.obstacle;
}

TEST(UcxWire, TakesOverNoSignal) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  EXPECT_EQ(signal_handlers(), handlers_at_load);
}

TEST(UcxWire, WhoDoesNotKnowTheSecretIsNotHeard) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  auto wire = make_wire(0, 2);
  auto stranger = make_wire(1, 2, {.key = 2});
  auto friendly = make_wire(1, 2);
  stranger->introduce(0, wire->address());
  friendly->introduce(0, wire->address());
  wire->introduce(1, friendly->address());
  const UcxWire* own = wire.get();
  RemoteTransport network(std::move(wire), {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = 4096});
  RemoteTransport liar(std::move(stranger), {.rank = 1, .world_size = 2, .peers = {0}, .window_bytes = 4096});
  RemoteTransport honest(std::move(friendly), {.rank = 1, .world_size = 2, .peers = {0}, .window_bytes = 4096});
  liar.tell_state(RankState::kFailed, "I am not who I say");
  std::byte lie{13};
  liar.try_send(0, Lane::kCollective, {&lie, 1});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (own->dropped() < 2 && std::chrono::steady_clock::now() < deadline) {
    liar.progress();
    network.progress();
  }
  EXPECT_EQ(own->dropped(), 2U);
  const std::byte truth{7};
  honest.try_send(0, Lane::kCollective, {&truth, 1});
  std::byte heard{};
  while (network.try_receive(1, Lane::kCollective, {&heard, 1}) == 0 && std::chrono::steady_clock::now() < deadline) {
    honest.progress();
  }
  EXPECT_EQ(heard, truth);
  EXPECT_EQ(network.liveness().state_of(1).state, RankState::kAlive);
}

struct Pair {
  std::unique_ptr<RemoteTransport> a, b;  // ranks 0 and 1
};

Pair make_pair_of(int64_t window_bytes, const WireChoice& choice) {
  auto a = make_wire(0, 2, choice);
  auto b = make_wire(1, 2, choice);
  a->introduce(1, b->address());
  b->introduce(0, a->address());
  return {
      std::make_unique<RemoteTransport>(std::move(a), RemoteTransportOptions{0, 2, {1}, window_bytes}),
      std::make_unique<RemoteTransport>(std::move(b), RemoteTransportOptions{1, 2, {0}, window_bytes}),
  };
}

// Of lengths on both sides of what is fetched, received in pieces that fit no frame, in both directions at once.
TEST(UcxWire, LongPayloadsKeepTheirOrderFetchedOrNot) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  constexpr size_t kBytes = 9'000'001;
  for (const WireChoice& choice : {WireChoice{}, WireChoice{.fetched_bytes = 1 << 15},
                                   WireChoice{.authenticates_payloads = false, .fetched_bytes = 1 << 15},
                                   WireChoice{.devices = "posix", .fetched_bytes = 1}}) {
    const Pair pair = make_pair_of(/*window_bytes=*/1 << 20, choice);
    RemoteTransport* ends[] = {pair.a.get(), pair.b.get()};
    std::vector<std::byte> sent(kBytes);
    std::vector<std::byte> received[2] = {std::vector<std::byte>(kBytes), std::vector<std::byte>(kBytes)};
    for (size_t i = 0; i < kBytes; ++i) sent[i] = stream_byte(0, 1, Lane::kCollective, i);
    size_t out[2] = {0, 0};
    size_t in[2] = {0, 0};
    size_t step = 1;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while ((in[0] < kBytes || in[1] < kBytes) && std::chrono::steady_clock::now() < deadline) {
      for (const int own : {0, 1}) {
        step = step * 7 % 1'000'003;
        out[own] += ends[own]->try_send(
            1 - own, Lane::kCollective,
            std::span<const std::byte>(sent).subspan(out[own], std::min(step + 1, kBytes - out[own])));
        const size_t wanted = std::min(step % 300'000 + 1, kBytes - in[own]);
        in[own] +=
            ends[own]->try_receive(1 - own, Lane::kCollective, std::span(received[own]).subspan(in[own], wanted));
        if (step % 5 == 0) ends[own]->progress();
      }
    }
    for (const auto& bytes : received) EXPECT_EQ(bytes, sent) << choice.devices << choice.fetched_bytes;
  }
}

// Its last words wait in its memory until they are fetched.
TEST(UcxWire, WhoClosesWaitsUntilItsPayloadsAreFetched) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  for (const char* devices : {"", "posix"}) {
    const Pair pair = make_pair_of(/*window_bytes=*/1 << 20, {.devices = devices, .fetched_bytes = 1});
    std::vector<std::byte> sent(500'000);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = stream_byte(0, 1, Lane::kCollective, i);
    std::vector<std::byte> received(sent.size());
    EXPECT_EQ(pair.a->try_send(1, Lane::kCollective, sent), sent.size());
    std::atomic<bool> is_closed{false};
    std::thread closing([&] {
      pair.a->close(std::chrono::seconds(20));
      is_closed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    size_t taken = 0;
    EXPECT_TRUE(eventually([&] {
      taken += pair.b->try_receive(0, Lane::kCollective, std::span(received).subspan(taken));
      return taken == received.size();
    })) << taken;
    EXPECT_EQ(received, sent);
    EXPECT_TRUE(eventually([&] { return pair.b->progress(), is_closed.load(); }));
    closing.join();
  }
}

// Here since the one signs no payloads, and the other wants signatures.
TEST(UcxWire, WhoIsLostForAReasonOfTheOtherLearnsOfIt) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  auto a = make_wire(0, 2, {.authenticates_payloads = false});
  auto b = make_wire(1, 2);
  a->introduce(1, b->address());
  b->introduce(0, a->address());
  RemoteTransport signs_nothing(std::move(a), RemoteTransportOptions{0, 2, {1}, /*window_bytes=*/4096});
  RemoteTransport wants_signatures(std::move(b), RemoteTransportOptions{1, 2, {0}, /*window_bytes=*/4096});
  const std::byte greeting{1};
  wants_signatures.try_send(0, Lane::kCollective, {&greeting, 1});
  signs_nothing.try_send(1, Lane::kCollective, {&greeting, 1});
  EXPECT_TRUE(eventually([&] {
    signs_nothing.progress();
    wants_signatures.progress();
    return signs_nothing.liveness().is_gone(1);
  }));
  const std::string reason = wants_signatures.liveness().state_of(0).loss;
  EXPECT_NE(reason.find("changed on the way"), std::string::npos) << reason;
  const std::string told = signs_nothing.liveness().state_of(1).failure;
  EXPECT_NE(told.find("[zeropg rank 1/2] it lost rank 0 (a frame's tag"), std::string::npos) << told;
}

TEST(UcxWire, AThirdRankIsMetOnlyWhenThereIsSomethingForIt) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  std::vector<std::unique_ptr<UcxWire>> wires;
  for (const int32_t rank : {0, 1, 2}) wires.push_back(make_wire(rank, 3));
  for (const int32_t rank : {0, 1, 2}) {
    for (const int32_t peer : {0, 1, 2}) {
      if (peer != rank) wires[static_cast<size_t>(rank)]->introduce(peer, wires[static_cast<size_t>(peer)]->address());
    }
  }
  std::vector<const UcxWire*> wire;
  std::vector<std::unique_ptr<RemoteTransport>> ends;
  for (int32_t rank = 0; rank < 3; ++rank) {
    wire.push_back(wires[static_cast<size_t>(rank)].get());
    ends.push_back(std::make_unique<RemoteTransport>(
        std::move(wires[static_cast<size_t>(rank)]),
        RemoteTransportOptions{rank, 3, {(rank + 1) % 3, (rank + 2) % 3}, /*window_bytes=*/4096}));
  }
  const std::byte data{13};
  EXPECT_EQ(ends[0]->try_send(1, Lane::kCollective, {&data, 1}), 1U);
  std::byte heard{};
  EXPECT_TRUE(eventually([&] {
    for (const auto& end : ends) end->progress();
    return ends[1]->try_receive(0, Lane::kCollective, {&heard, 1}) == 1;
  }));
  EXPECT_TRUE(wire[0]->has_met(1) && wire[1]->has_met(0));
  EXPECT_FALSE(wire[0]->has_met(2) || wire[1]->has_met(2) || wire[2]->has_met(0) || wire[2]->has_met(1));
  // Who fails tells whoever can wait for it: all, in a small group.
  ends[2]->tell_state(RankState::kFailed, "out of luck");
  EXPECT_TRUE(eventually([&] {
    for (const auto& end : ends) end->progress();
    return ends[0]->liveness().state_of(2).state == RankState::kFailed &&
           ends[1]->liveness().state_of(2).state == RankState::kFailed;
  }));
}

// As if it had been changed on the way: its sender gives no digest of it.
TEST(UcxWire, APayloadThatIsNotTheSealedOneLosesThePeer) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  auto wire = make_wire(0, 2);
  auto other = make_wire(1, 2, {.authenticates_payloads = false});
  other->introduce(0, wire->address());
  wire->introduce(1, other->address());
  RemoteTransport network(std::move(wire), {.rank = 0, .world_size = 2, .peers = {1}, .window_bytes = 4096});
  RemoteTransport peer(std::move(other), {.rank = 1, .world_size = 2, .peers = {0}, .window_bytes = 4096});
  const std::byte data{13};
  peer.try_send(0, Lane::kCollective, {&data, 1});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!network.liveness().state_of(1).is_lost && std::chrono::steady_clock::now() < deadline) {
    peer.progress();
    network.progress();
  }
  EXPECT_EQ(network.liveness().state_of(1).loss.rfind("a frame's tag did not match", 0), 0U);
}

}  // namespace
}  // namespace zeropg

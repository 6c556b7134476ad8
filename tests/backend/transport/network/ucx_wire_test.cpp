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

std::unique_ptr<UcxWire> make_wire(int32_t rank, int32_t world_size, uint64_t key = 1,
                                   bool authenticates_payloads = true) {
  return UcxWire::make({.root = "",
                        .rank = rank,
                        .world_size = world_size,
                        .seal = [key](int32_t from, int32_t to,
                                      std::span<const std::byte> message) { return test_seal(key, from, to, message); },
                        .authenticates_payloads = authenticates_payloads});
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
        if (peer != rank) wires[rank]->connect(peer, wires[peer]->address());
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
  auto stranger = make_wire(1, 2, /*key=*/2);
  auto friendly = make_wire(1, 2);
  stranger->connect(0, wire->address());
  friendly->connect(0, wire->address());
  wire->connect(1, friendly->address());
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

// As if it had been changed on the way: its sender gives no digest of it.
TEST(UcxWire, APayloadThatIsNotTheSealedOneLosesThePeer) {
  if (!why_there_is_none().empty()) GTEST_SKIP() << why_there_is_none();
  auto wire = make_wire(0, 2);
  auto other = make_wire(1, 2, /*key=*/1, /*authenticates_payloads=*/false);
  other->connect(0, wire->address());
  wire->connect(1, other->address());
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

#include "backend/bootstrap/bootstrap.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/bootstrap/store_records.h"
#include "backend/cryptography/derived_keys.h"
#include "backend/platform/memory/sealed_memory.h"
#include "backend/transport/network/registry.h"
#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

BootstrapOptions small_options(milliseconds timeout = milliseconds(20000)) {
  BootstrapOptions options;
  options.timeout = timeout;
  options.bank_bytes = 4096;
  options.mailbox_bytes = 1024;
  return options;
}

struct Outcome {
  BootstrapResult result;
  std::string error;
};

// One thread per rank over one store; `options_of(rank)`; ranks in `absent` do not come.
std::vector<Outcome> run(int world_size, const std::function<BootstrapOptions(int)>& options_of,
                         const std::set<int>& absent = {},
                         const Store& store = c10::make_intrusive<c10d::HashStore>()) {
  std::vector<Outcome> outcomes(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    if (absent.contains(rank)) continue;
    threads.emplace_back([&, rank] {
      try {
        outcomes[rank].result = bootstrap(store, rank, world_size, options_of(rank));
      } catch (const c10::Error& error) {
        outcomes[rank].error = error.what_without_backtrace();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::set<std::string> open_descriptors() {
  std::set<std::string> names;
  DIR* folder = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) {
    if (std::atoi(entry->d_name) != ::dirfd(folder)) names.insert(entry->d_name);
  }
  ::closedir(folder);
  return names;
}

TEST(Bootstrap, OneRankNeedsNoStore) {
  const BootstrapResult result = bootstrap(nullptr, 0, 1, small_options());
  ASSERT_NE(result.arena, nullptr);
  EXPECT_EQ(result.topology.world_size(), 1);
  Descriptor fd(share_descriptor(
      *result.channel, [] { return create_sealed_memory("test", 4096); }, milliseconds(100)));
  EXPECT_TRUE(fd);
}

TEST(Bootstrap, EveryRankGetsTheSameTopologyAndArena) {
  for (const int world_size : {2, 3, 8}) {
    auto outcomes = run(world_size, [](int) { return small_options(); });
    for (int rank = 0; rank < world_size; ++rank) {
      ASSERT_EQ(outcomes[rank].error, "");
      const auto& [topology, arena, pool, channel, network] = outcomes[rank].result;
      EXPECT_GT(pool->bytes_per_rank(), 0);
      EXPECT_EQ(network, nullptr);
      EXPECT_EQ(topology.rank, rank);
      EXPECT_EQ(topology.node_count(), 1);
      EXPECT_EQ(topology.host_ids, outcomes[0].result.topology.host_ids);
      EXPECT_EQ(arena->rank(), rank);
      std::memcpy(arena->staging(rank, 0), &rank, sizeof rank);
      arena->arrive(1);
    }
    for (auto& [result, error] : outcomes) {
      EXPECT_TRUE(result.arena->all_arrived(1));
      for (int peer = 0; peer < world_size; ++peer) {
        int seen = -1;
        std::memcpy(&seen, result.arena->staging(peer, 0), sizeof seen);
        EXPECT_EQ(seen, peer);
      }
    }
  }
}

TEST(Bootstrap, SharesDescriptorsInOrder) {
  auto outcomes = run(3, [](int) { return small_options(); });
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      for (int64_t pages = 1; pages <= 5; ++pages) {
        int created = 0;
        Descriptor fd(share_descriptor(
            *outcomes[rank].result.channel,
            [&] {
              ++created;
              return create_sealed_memory("test", 4096 * pages);
            },
            milliseconds(20000)));
        const SealedMapping mapping(fd.get(), 4096 * pages);  // checks the size
        if (created == (rank == 0 ? 1 : 0)) ++right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 15);
}

TEST(Bootstrap, FailureToCreateIsToldToAll) {
  auto outcomes = run(2, [](int) { return small_options(); });
  std::string error;
  std::thread member([&] {
    try {
      share_descriptor(
          *outcomes[1].result.channel, [] { return -1; }, milliseconds(20000));
    } catch (const c10::DistBackendError& e) {
      error = e.what_without_backtrace();
    }
  });
  EXPECT_THROW(share_descriptor(
                   *outcomes[0].result.channel, []() -> int { C10_THROW_ERROR(DistBackendError, "no memory left"); },
                   milliseconds(20000)),
               c10::DistBackendError);
  member.join();
  EXPECT_EQ(error, "[zeropg rank 1/2] share_descriptor: no memory left");
}

TEST(Bootstrap, SilentLeaderIsNamedAtTheDeadline) {
  auto outcomes = run(2, [](int) { return small_options(); });
  try {
    share_descriptor(
        *outcomes[1].result.channel, [] { return -1; }, milliseconds(50));
    FAIL();
  } catch (const c10::DistBackendError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "[zeropg rank 1/2] share_descriptor: rank 0: no answer in time");
  }
}

TEST(Bootstrap, SecondGroupOnTheSameStoreNeedsItsOwnPrefixOnly) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int life = 0; life < 3; ++life) {  // keys are cleaned up, so even the same prefix works again
    auto outcomes = run(
        2, [](int) { return small_options(); }, {}, store);
    EXPECT_EQ(outcomes[0].error + outcomes[1].error, "");
  }
  EXPECT_EQ(store->getNumKeys(), 0) << "the secret must not stay in the store";
}

TEST(Bootstrap, MissingRanksAreNamed) {
  auto outcomes = run(4, [](int) { return small_options(milliseconds(5000)); }, {1, 3});
  for (const int rank : {0, 2}) {
    const std::string& error = outcomes[rank].error;
    EXPECT_EQ(error.rfind("[zeropg rank " + std::to_string(rank) + "/4] bootstrap: ", 0), 0U) << error;
    EXPECT_NE(error.find("ranks 1, 3 did not come"), std::string::npos) << error;
  }
}

TEST(Bootstrap, MissingRankZeroIsNamed) {
  auto outcomes = run(2, [](int) { return small_options(milliseconds(5000)); }, {0});
  EXPECT_NE(outcomes[1].error.find("rank 0 did not come"), std::string::npos) << outcomes[1].error;
}

TEST(Bootstrap, DifferentOptionsAreAnErrorOnEveryRank) {
  auto outcomes = run(3, [](int rank) {
    BootstrapOptions options = small_options();
    if (rank == 2) options.bank_bytes = 8192;
    return options;
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find("bank_bytes is 4096 on rank 0 but 8192 on rank 2"), std::string::npos)
        << outcome.error;
  }
}

TEST(Bootstrap, TheUsersSecretIsNotInTheStore) {
  auto outcomes = run(3, [](int) {
    BootstrapOptions options = small_options();
    options.secret = "correct horse battery staple";
    return options;
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.error, "");
}

TEST(Bootstrap, WrongSecretIsAnErrorOnEveryRankBeforeTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  auto outcomes = run(3, [](int rank) {
    BootstrapOptions options = small_options();
    options.secret = rank == 1 ? "wrong" : "right";
    return options;
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find("did not take this rank's proof"), std::string::npos) << outcome.error;
    EXPECT_NE(outcome.error.find("ZEROPG_SECRET"), std::string::npos) << outcome.error;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10000));
}

TEST(Bootstrap, SecretOnSomeRanksOnlyIsNamed) {
  auto outcomes = run(2, [](int rank) {
    BootstrapOptions options = small_options();
    if (rank == 1) options.secret = "only here";
    return options;
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find("whether a secret is given"), std::string::npos) << outcome.error;
  }
}

BootstrapOptions options_on(const std::string& host) {
  BootstrapOptions options = small_options();
  options.host_id = host;
  return options;
}

// Every rank sends its number to every rank of other nodes.
void expect_connected(std::vector<Outcome>& outcomes) {
  const auto world_size = static_cast<int32_t>(outcomes.size());
  for (int32_t rank = 0; rank < world_size; ++rank) {
    const BootstrapResult& own = outcomes[rank].result;
    for (int32_t peer = 0; peer < world_size; ++peer) {
      const bool is_remote = own.topology.node_rank[peer] != own.topology.node_rank[rank];
      ASSERT_EQ(own.network->can_reach(peer), is_remote);
      const auto byte = static_cast<std::byte>(rank);
      if (is_remote) {
        EXPECT_EQ(own.network->try_send(peer, Lane::kCollective, {&byte, 1}), 1U);
      }
    }
  }
  for (int32_t rank = 0; rank < world_size; ++rank) {
    for (int32_t peer = 0; peer < world_size; ++peer) {
      RemoteTransport& network = *outcomes[rank].result.network;
      std::byte byte{255};
      while (network.can_reach(peer) && network.try_receive(peer, Lane::kCollective, {&byte, 1}) == 0) {
      }
      if (network.can_reach(peer)) {
        EXPECT_EQ(static_cast<int32_t>(byte), peer);
      }
    }
  }
}

// Somebody who may write to the store reads the map of a group of two, and changes it.
class StoreWithAnotherMap : public c10d::HashStore {
 public:
  explicit StoreWithAnotherMap(std::function<void(GroupMap*)> change) : change_(std::move(change)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key != "zeropg/map") return HashStore::set(key, value);
    GroupMap map = decode_map(std::string(value.begin(), value.end()), 2);
    if (map.error.empty()) change_(&map);
    const std::string changed = encode(map);
    HashStore::set(key, {changed.begin(), changed.end()});
  }

 private:
  std::function<void(GroupMap*)> change_;
};

TEST(Bootstrap, ANetworkThatARankDidNotOfferIsNotUsed) {
  const std::vector<std::string> offered = offer_wires(kAutomaticNetwork, "").names();
  std::vector<std::string> others{"", "pigeons", std::string("\0\xff", 2), std::string(1000, 'x')};
  for (const WireEntry& wire : wires()) {
    if (std::find(offered.begin(), offered.end(), wire.name) == offered.end()) others.emplace_back(wire.name);
  }
  for (const std::string& network : others) {
    auto outcomes = run(
        2, [](int rank) { return options_on(rank == 0 ? "a" : "b"); }, {},
        c10::make_intrusive<StoreWithAnotherMap>([&](GroupMap* map) { map->network = network; }));
    const std::string expected = network.empty() ? "no network that every rank can use" : "did not offer";
    EXPECT_NE(outcomes[1].error.find(expected), std::string::npos) << network << ": " << outcomes[1].error;
    EXPECT_NE(outcomes[0].error.find("rank 1: "), std::string::npos) << network << ": " << outcomes[0].error;
  }
}

BootstrapOptions options_with_secret(const std::string& secret) {
  BootstrapOptions options = small_options();
  options.secret = secret;
  return options;
}

TEST(Bootstrap, AKeyIsDerivedFromASecretOnceForAllGroupsOfTheSameRanks) {
  std::vector<std::string> salts;
  for (int group = 0; group < 2; ++group) {
    const auto store = c10::make_intrusive<StoreWithAnotherMap>([&](GroupMap* map) {
      EXPECT_EQ(map->secret, "");
      salts.push_back(map->salt);
    });
    for (const Outcome& outcome : run(
             2, [](int) { return options_with_secret("derived once"); }, {}, store)) {
      EXPECT_EQ(outcome.error, "");
    }
  }
  EXPECT_EQ(salts, (std::vector<std::string>{"", last_derived_key("derived once").salt}));
}

// The salt would be one for which he has tried a dictionary beforehand.
TEST(Bootstrap, WhoWritesToTheStoreCannotChooseTheSalt) {
  const std::function<void(GroupMap*)> changes[] = {
      [](GroupMap* map) { map->salt = "prepared"; },
      [](GroupMap* map) {
        map->socket_names = {"prepared", "names"};
      },
  };
  for (const auto& change : changes) {
    auto outcomes = run(
        2, [](int) { return options_with_secret("salted"); }, {}, c10::make_intrusive<StoreWithAnotherMap>(change));
    EXPECT_NE(outcomes[1].error.find("somebody else writes to it"), std::string::npos) << outcomes[1].error;
    EXPECT_NE(outcomes[0].error.find("rank 1: "), std::string::npos) << outcomes[0].error;
    EXPECT_EQ(last_derived_key("salted").salt.find("prepared"), std::string::npos);
  }
}

TEST(Bootstrap, SeveralNodesGetAnArenaEachAndConnections) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto outcomes = run(
      5, [](int rank) { return options_on(rank == 1 || rank == 3 ? "b" : "a"); }, {}, store);
  for (int rank = 0; rank < 5; ++rank) {
    ASSERT_EQ(outcomes[rank].error, "");
    const BootstrapResult& result = outcomes[rank].result;
    EXPECT_EQ(result.topology.nodes, (std::vector<std::vector<int32_t>>{{0, 2, 4}, {1, 3}}));
    EXPECT_EQ(result.arena->rank(), result.topology.local_rank[rank]);
    EXPECT_EQ(result.arena->geometry().world_size, rank % 2 == 0 ? 3 : 2);
    result.arena->arrive(1);
  }
  for (const Outcome& outcome : outcomes) EXPECT_TRUE(outcome.result.arena->all_arrived(1));
  expect_connected(outcomes);
  EXPECT_EQ(store->getNumKeys(), 0) << "neither the secret nor an address must stay in the store";
}

TEST(Bootstrap, NodesOfOneRankEach) {
  for (const bool authenticates_frames : {false, true}) {
    auto outcomes = run(3, [&](int rank) {
      BootstrapOptions options = options_on(std::to_string(rank));
      options.authenticates_frames = authenticates_frames;
      return options;
    });
    for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.error, "");
    expect_connected(outcomes);
  }
}

TEST(Bootstrap, FramesThatOnlySomeRanksAuthenticateAreAnErrorOnEveryRank) {
  auto outcomes = run(3, [](int rank) {
    BootstrapOptions options = options_on(std::to_string(rank));
    options.authenticates_frames = rank != 2;
    return options;
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find("authenticate_frames is 1 on rank 0 but 0 on rank 2"), std::string::npos)
        << outcome.error;
  }
}

TEST(Bootstrap, WrongSecretOnAnotherNodeIsAnErrorOnEveryRankBeforeTheDeadline) {
  for (const char* connections : {"all", "on_demand"}) {
    const auto start = std::chrono::steady_clock::now();
    auto outcomes = run(3, [&](int rank) {
      BootstrapOptions options = options_on(std::to_string(rank));
      options.connections = connections;
      options.secret = rank == 1 ? "wrong" : "right";
      return options;
    });
    for (const Outcome& outcome : outcomes) {
      EXPECT_NE(outcome.error.find("does not prove the group's secret"), std::string::npos) << outcome.error;
      EXPECT_NE(outcome.error.find("ZEROPG_SECRET"), std::string::npos) << outcome.error;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10000));
  }
}

int tcp_connections() {
  int count = 0;
  for (const std::string& name : open_descriptors()) {
    int protocol = 0;
    socklen_t bytes = sizeof protocol;
    sockaddr_storage peer{};
    socklen_t peer_bytes = sizeof peer;
    const int fd = std::atoi(name.c_str());
    if (::getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &bytes) != 0 || protocol != IPPROTO_TCP) continue;
    count += ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 ? 1 : 0;
  }
  return count;
}

int64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) * 1024;
  }
  return 0;
}

constexpr bool kIsSanitized =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

// Threads of one process, so what a rank costs is theirs, and descriptors are all of one table.
TEST(Bootstrap, ALargeGroupConnectsAtFirstTheFirstRanksOfNodesWithRankZero) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  const int nodes = limit.rlim_cur > 10'000 && !kIsSanitized ? 128 : 16;
  const int ranks = nodes * 8;
  const int64_t before = anonymous_bytes();
  auto outcomes = run(ranks, [&](int rank) {
    BootstrapOptions options = options_on(std::to_string(rank % nodes));
    options.measures_links = false;
    options.timeout = milliseconds(120'000);
    options.connections = "on_demand";
    return options;
  });
  for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.error, "");
  EXPECT_EQ(tcp_connections(), 2 * (nodes - 1)) << "both ends are here";
  if (!kIsSanitized) {
    EXPECT_LT((anonymous_bytes() - before) / ranks, 2 << 20);
  }
}

TEST(Bootstrap, ARankOfAnotherNodeThatStaysAwayIsNamed) {
  auto outcomes = run(3,
                      [](int rank) {
                        BootstrapOptions options = options_on(std::to_string(rank));
                        options.timeout = milliseconds(5000);
                        return options;
                      },
                      {2});
  for (const int rank : {0, 1}) {
    EXPECT_NE(outcomes[rank].error.find("rank 2"), std::string::npos) << outcomes[rank].error;
  }
}

TEST(Bootstrap, LeavesNoDescriptorOpen) {
  run(2, [](int) { return small_options(); });  // opens the process's doorbell
  const std::set<std::string> before = open_descriptors();
  {
    auto outcomes = run(3, [](int) { return small_options(); });
    EXPECT_GT(open_descriptors().size(), before.size());
  }
  run(3, [](int) { return small_options(milliseconds(100)); }, {2});
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Bootstrap, RefusesARankOutsideTheWorld) {
  EXPECT_THROW(bootstrap(nullptr, 2, 2, small_options()), c10::ValueError);
  BootstrapOptions options = small_options();
  options.mailbox_bytes = 1000;
  EXPECT_THROW(bootstrap(nullptr, 0, 2, options), c10::ValueError);
}

// Real processes over a file, as torchrun's would be over TCP.
TEST(Bootstrap, ProcessesMeetAndNoticeADeath) {
  char path[] = "/tmp/zeropg_bootstrap_test_XXXXXX";
  ::close(::mkstemp(path));
  std::vector<ChildProcess> children;
  for (int rank = 0; rank < 3; ++rank) {
    children.emplace_back([&path, rank] {
      const Store store = c10::make_intrusive<c10d::FileStore>(path, 3);
      const BootstrapResult result = bootstrap(store, rank, 3, small_options());
      ShmArena& arena = *result.arena;
      arena.arrive(1);
      while (!arena.all_arrived(1)) std::this_thread::sleep_for(milliseconds(1));
      if (rank == 2) ::kill(::getpid(), SIGKILL);
      while (arena.is_process_alive(2)) std::this_thread::sleep_for(milliseconds(1));
      // The other survivor is still seen as alive until it says otherwise.
      arena.arrive(2);
      while (arena.missing(2) != std::vector<int32_t>{2}) std::this_thread::sleep_for(milliseconds(1));
      return arena.is_process_alive(1 - rank) || arena.state_of(1 - rank) == RankState::kDeparted;
    });
  }
  EXPECT_TRUE(children[0].succeeded());
  EXPECT_TRUE(children[1].succeeded());
  EXPECT_FALSE(children[2].succeeded());
  ::unlink(path);
}

}  // namespace
}  // namespace zeropg

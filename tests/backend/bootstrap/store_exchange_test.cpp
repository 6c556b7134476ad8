#include "backend/bootstrap/store_exchange.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/diagnostics/notices.h"
#include "backend/transport/network/registry.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

RankRecord record_of(int32_t rank, int32_t world_size) {
  RankRecord record;
  record.world_size = world_size;
  record.place = {"host", "domain" + std::to_string(rank % 2), "rack"};
  record.socket_name = "socket" + std::to_string(rank);
  record.network = kAutomaticNetwork;
  record.wires = {"no such wire", std::string(wires()[0].name)};
  return record;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

class RendezvousTest : public ::testing::Test {
 protected:
  StoreExchange of(int32_t rank, int32_t world_size = 2, milliseconds timeout = milliseconds(20000)) {
    return {store_, rank, world_size, deadline_after(timeout)};
  }

  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(RendezvousTest, EveryRankReadsTheSameMap) {
  std::vector<GroupMap> maps(3);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] { maps[rank] = of(rank, 3).exchange(record_of(rank, 3)); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const GroupMap& map : maps) {
    EXPECT_EQ(map.secret, maps[0].secret);
    EXPECT_EQ(map.secret.size(), 64U);
    EXPECT_EQ(map.network, wires()[0].name);
    EXPECT_EQ(map.places, (std::vector<RankPlace>{
                              {"host", "domain0", "rack"}, {"host", "domain1", "rack"}, {"host", "domain0", "rack"}}));
    EXPECT_EQ(map.socket_names, (std::vector<std::string>{"socket0", "socket1", "socket2"}));
  }
}

TEST_F(RendezvousTest, ANetworkThatIsNotTheSameOnEveryRankIsNamed) {
  std::string error;
  std::thread peer([&] {
    RankRecord other = record_of(1, 2);
    other.network = "pigeons\n\x1b[31m";
    error = error_of([&] { of(1).exchange(other); });
  });
  EXPECT_EQ(error_of([&] { of(0).exchange(record_of(0, 2)); }),
            "network is automatic on rank 0 but pigeons  [31m on rank 1; give every rank the same options");
  peer.join();
  EXPECT_NE(error.find("pigeons"), std::string::npos) << error;
}

TEST_F(RendezvousTest, HostsThatTheTopologyFileCannotTellApartAreNamed) {
  std::thread peer([&] {
    RankRecord other = record_of(1, 2);
    other.place.host_id = "another";
    other.host_name = "node";
    error_of([&] { of(1).exchange(other); });
  });
  RankRecord own = record_of(0, 2);
  own.host_name = "node";
  EXPECT_EQ(
      error_of([&] { of(0).exchange(own); }),
      "ranks 0 and 1 are on different hosts that are both called node, which the topology file cannot tell apart; "
      "give them host names or ZEROPG_HOST_IDs of their own");
  peer.join();
}

TEST_F(RendezvousTest, RanksWithoutACommonWireAreToldSo) {
  std::thread peer([&] {
    RankRecord other = record_of(1, 2);
    other.wires = {"another", std::string(1000, 'x')};
    EXPECT_EQ(of(1).exchange(other).network, "");
  });
  EXPECT_EQ(of(0).exchange(record_of(0, 2)).network, "");
  peer.join();
}

TEST_F(RendezvousTest, GarbageInTheStoreIsAnErrorNotACrash) {
  std::mt19937 random(7);
  for (size_t bytes = 0; bytes < 200; bytes += 7) {
    std::string garbage(bytes, '\0');
    for (char& c : garbage) c = static_cast<char>(random());
    store_->set("zeropg/rank/1", garbage);
    EXPECT_NE(error_of([&] { of(0).exchange(record_of(0, 2)); }).find("damaged"), std::string::npos);
    store_->set("zeropg/map", garbage);
    EXPECT_NE(error_of([&] { of(1).exchange(record_of(1, 2)); }).find("damaged"), std::string::npos);
  }
}

TEST_F(RendezvousTest, TruncatedMapIsAnError) {
  std::thread peer([&] { of(1).exchange(record_of(1, 2)); });
  of(0).exchange(record_of(0, 2));
  peer.join();
  const std::string map = store_->get_to_str("zeropg/map");
  for (size_t bytes = 0; bytes < map.size(); ++bytes) {
    store_->set("zeropg/map", map.substr(0, bytes));
    EXPECT_NE(error_of([&] { of(1).exchange(record_of(1, 2)); }).find("damaged"), std::string::npos);
  }
  store_->set("zeropg/map", map + "x");
  EXPECT_NE(error_of([&] { of(1).exchange(record_of(1, 2)); }).find("damaged"), std::string::npos);
}

class CountingStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> get(const std::string& key) override {
    ++reads;
    const std::vector<uint8_t> value = HashStore::get(key);
    bytes += value.size();
    return value;
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++reads;
    const std::vector<std::vector<uint8_t>> values = HashStore::multiGet(keys);
    for (const auto& value : values) bytes += value.size();
    return values;
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++writes;
    HashStore::set(key, value);
  }

  std::atomic<int> reads{0};
  std::atomic<int> writes{0};
  std::atomic<uint64_t> bytes{0};
};

TEST_F(RendezvousTest, AddressesReachAllRanksInAReadEach) {
  constexpr int32_t kRanks = 24;
  auto store = c10::make_intrusive<CountingStore>();
  store_ = store;
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::vector<int32_t> peers{(rank + 1) % kRanks, (rank + 5) % kRanks};
      const std::vector<std::string> addresses =
          of(rank, kRanks).exchange_addresses("address " + std::to_string(rank), peers, {"group", "secret"});
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        const bool is_wanted = peer == peers[0] || peer == peers[1];
        EXPECT_EQ(addresses[peer], is_wanted ? "address " + std::to_string(peer) : "");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(store->reads, kRanks + 1);
  of(0, kRanks).clean_up();
  EXPECT_FALSE(store_->check({"zeropg/addresses"}));
  EXPECT_FALSE(store_->check({"zeropg/address/0"}) || store_->check({"zeropg/address/23"}));
}

// Of a group on nodes of 8 ranks.
c10::intrusive_ptr<CountingStore> store_of_a_meeting(int32_t ranks) {
  auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      RankRecord record = record_of(rank, ranks);
      record.place.host_id = std::string(60, 'h') + std::to_string(rank / 8);
      record.socket_name = "zeropg-" + std::string(32, 's');
      const GroupMap map = StoreExchange(store, rank, ranks, deadline_after(milliseconds(60000))).exchange(record);
      EXPECT_EQ(map.places[ranks - 1].host_id, std::string(60, 'h') + std::to_string((ranks - 1) / 8));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return store;
}

TEST_F(RendezvousTest, ARankReadsOnceHoweverManyThereAre) {
  for (const int32_t ranks : {16, 64, 256}) {
    const auto store = store_of_a_meeting(ranks);
    EXPECT_EQ(store->reads, ranks) << "rank 0 reads all records at once, the others the map";
    EXPECT_EQ(store->writes, ranks + 1);
    const uint64_t of_a_rank = store->bytes / ranks;
    EXPECT_LE(of_a_rank, 500U + 100U * ranks) << ranks;
  }
}

TEST_F(RendezvousTest, FailureOfOneRankEndsTheWaitOfTheOthers) {
  of(2, 3).report_failure("the disk is on fire");
  of(1, 3).report_failure("a consequence");
  const auto start = Clock::now();
  EXPECT_EQ(error_of([&] { of(0, 3).exchange(record_of(0, 3)); }), "rank 2: the disk is on fire");
  EXPECT_LT(Clock::now() - start, milliseconds(10000));
}

TEST_F(RendezvousTest, WhoLosesARankThatLostAnotherNamesTheFirst) {
  std::string cause;
  std::thread loses_rank_2([&] { of(0, 3).find_cause("the peer closed the connection 2", 2); });
  std::thread loses_rank_0([&] { cause = of(1, 3).find_cause("the peer closed the connection 0", 0); });
  loses_rank_2.join();
  loses_rank_0.join();
  EXPECT_EQ(cause, "the peer closed the connection 2; look for the error of rank 2 or a kill (out of memory?)");
}

TEST_F(RendezvousTest, RanksThatLoseEachOtherNameEachOther) {
  std::string cause;
  std::thread loses_rank_1([&] { of(0, 2, milliseconds(2000)).find_cause("no way to rank 1", 1); });
  std::thread loses_rank_0([&] { cause = of(1, 2, milliseconds(2000)).find_cause("no way to rank 0", 0); });
  loses_rank_1.join();
  loses_rank_0.join();
  EXPECT_EQ(cause, "no way to rank 0; look for the error of rank 0 or a kill (out of memory?)");
}

TEST_F(RendezvousTest, TheRollCallFindsWhomAllWaitFor) {
  std::string cause;
  std::thread waits_for_2([&] {
    StoreExchange rank_1 = of(1, 4);
    for (int i = 0; i < 60 && !store_->check({"zeropg/present/1"}); ++i) {
      rank_1.look_around({2});
      std::this_thread::sleep_for(milliseconds(50));
    }
  });
  StoreExchange rank_0 = of(0, 4, milliseconds(1));
  std::this_thread::sleep_for(milliseconds(5));
  rank_0.look_around({1});  // rank 3 is not waited for
  EXPECT_EQ(rank_0.find_cause("late", std::nullopt),
            "late; rank 1 itself waits for rank 2; no sign of life from rank 2; see what rank 2 does");
  waits_for_2.join();
}

TEST_F(RendezvousTest, LateRanksAreNamed) {
  EXPECT_NE(error_of([&] { of(0, 4, milliseconds(50)).exchange(record_of(0, 4)); }).find("ranks 1, 2, 3 did not come"),
            std::string::npos);
}

// Rank 0 writes the map, and takes back its record, just when another rank asks for that.
class StoreWhereRank0GivesUp : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    if (keys[0] == "zeropg/rank/0") {
      GroupMap map;
      map.error = "rank 1 did not come";
      Store::set("zeropg/map", encode(map));
      deleteKey("zeropg/rank/0");
    }
    return HashStore::check(keys);
  }
};

TEST_F(RendezvousTest, WhoGivesUpEarlierIsNotCalledLate) {
  store_ = c10::make_intrusive<StoreWhereRank0GivesUp>();
  store_->set("zeropg/rank/0", "");
  EXPECT_EQ(error_of([&] { of(2, 3, milliseconds(50)).exchange(record_of(2, 3)); }), "rank 1 did not come");
}

// The mode of a FileStore's file that had `mode`, once two ranks have met there.
mode_t mode_after_a_meeting(mode_t mode, bool have_secret, std::string* met_at = nullptr) {
  char path[] = "/tmp/zeropg_rendezvous_test_XXXXXX";
  ::close(::mkstemp(path));
  ::chmod(path, mode);
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("group", c10::make_intrusive<c10d::FileStore>(std::string(path), 2));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      RankRecord record = record_of(rank, 2);
      record.has_secret = have_secret ? 1 : 0;
      StoreExchange(store, rank, 2, deadline_after(milliseconds(20000))).exchange(record);
    });
  }
  for (std::thread& thread : threads) thread.join();
  struct stat status {};
  EXPECT_EQ(::stat(path, &status), 0);
  ::unlink(path);
  if (met_at != nullptr) *met_at = path;
  return status.st_mode & 0777;
}

TEST(RendezvousFile, WhoMayOnlyReadItDoesNotReadTheSecret) {
  set_notice_bell([] {});
  EXPECT_EQ(mode_after_a_meeting(0644, false), 0600U);
  EXPECT_EQ(mode_after_a_meeting(0640, false), 0600U);
  EXPECT_EQ(mode_after_a_meeting(0600, false), 0600U);
  EXPECT_TRUE(take_notices().empty());
  set_notice_bell(nullptr);
}

TEST(RendezvousFile, StaysAsItIsWithoutASecretInIt) { EXPECT_EQ(mode_after_a_meeting(0644, true), 0644U); }

TEST(RendezvousFile, OthersWhoMayWriteItAreNamedToTheUser) {
  set_notice_bell([] {});
  std::string path;
  EXPECT_EQ(mode_after_a_meeting(0664, false, &path), 0660U) << "the group's members may be ranks";
  const std::vector<std::string> notices = take_notices();
  set_notice_bell(nullptr);
  ASSERT_EQ(notices.size(), 1U);
  EXPECT_NE(notices[0].find(path), std::string::npos) << notices[0];
  EXPECT_NE(notices[0].find("ZEROPG_SECRET_FILE"), std::string::npos) << notices[0];
}

}  // namespace
}  // namespace zeropg

#include "backend/rendezvous.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace zeropg {
namespace {

using std::chrono::milliseconds;

RankRecord record_of(int32_t rank, int32_t world_size) {
  RankRecord record;
  record.world_size = world_size;
  record.host_id = "host";
  record.socket_name = "socket" + std::to_string(rank);
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
  Rendezvous of(int32_t rank, int32_t world_size = 2, milliseconds timeout = milliseconds(20000)) {
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
    EXPECT_EQ(map.host_ids, std::vector<std::string>(3, "host"));
    EXPECT_EQ(map.socket_names, (std::vector<std::string>{"socket0", "socket1", "socket2"}));
  }
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

TEST_F(RendezvousTest, FailureOfOneRankEndsTheWaitOfTheOthers) {
  of(2, 3).report_failure("the disk is on fire");
  of(1, 3).report_failure("a consequence");
  const auto start = Clock::now();
  EXPECT_EQ(error_of([&] { of(0, 3).exchange(record_of(0, 3)); }), "rank 2: the disk is on fire");
  EXPECT_LT(Clock::now() - start, milliseconds(10000));
}

TEST_F(RendezvousTest, LateRanksAreNamed) {
  EXPECT_NE(error_of([&] { of(0, 4, milliseconds(50)).exchange(record_of(0, 4)); }).find("ranks 1, 2, 3 did not come"),
            std::string::npos);
}

}  // namespace
}  // namespace zeropg

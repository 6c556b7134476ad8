#include "backend/transport/shm/shm_transport.h"

#include <gtest/gtest.h>

#include "backend/platform/process/doorbell.h"
#include "tests/backend/child_process.h"
#include "tests/backend/transport/transport_suite.h"

namespace zeropg {
namespace {

class ShmWorld final : public TransportWorld {
 public:
  explicit ShmWorld(int32_t world_size) {
    const ArenaGeometry geometry{world_size, 0, 4096};
    const Descriptor fd(ShmArena::create(geometry));
    for (int32_t rank = 0; rank < world_size; ++rank) {
      arenas_.push_back(std::make_unique<ShmArena>(::dup(fd.get()), geometry, rank));
      transports_.push_back(std::make_unique<ShmTransport>(*arenas_.back()));
    }
  }
  Transport& rank(int32_t rank) override { return *transports_[rank]; }
  void depart(int32_t rank) override { arenas_[rank]->set_state(RankState::kDeparted); }
  ShmArena& arena(int32_t rank) { return *arenas_[rank]; }

 private:
  std::vector<std::unique_ptr<ShmArena>> arenas_;
  std::vector<std::unique_ptr<ShmTransport>> transports_;
};

std::unique_ptr<TransportWorld> make_shm_world(int32_t world_size) { return std::make_unique<ShmWorld>(world_size); }

INSTANTIATE_TEST_SUITE_P(Shm, TransportSuite, ::testing::Values(make_shm_world));

TEST(ShmTransport, WithoutMailboxesNobodyIsReached) {
  const ArenaGeometry geometry{2, 4096, 0};
  ShmArena arena(ShmArena::create(geometry), geometry, 0);
  EXPECT_FALSE(ShmTransport(arena).can_reach(1));
}

TEST(ShmTransport, TakesAWholeRingAtOnce) {
  ShmWorld world(2);
  const std::vector<std::byte> data(5000);
  EXPECT_EQ(world.rank(0).try_send(1, Lane::kCollective, data), 4096U);
  EXPECT_EQ(world.rank(0).try_send(1, Lane::kCollective, data), 0U);
}

TEST(ShmTransport, FailureOfThePeerCarriesItsWords) {
  ShmWorld world(2);
  world.arena(1).set_state(RankState::kFailed, "out of luck");
  std::byte data{};
  try {
    world.rank(0).try_receive(1, Lane::kCollective, {&data, 1});
    FAIL();
  } catch (const c10::DistNetworkError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "shm transport: rank 1 failed: out of luck");
  }
}

TEST(ShmTransport, CountersOfAPeerAreNotBelieved) {
  const std::vector<std::byte> data(5000);
  std::vector<std::byte> buffer(5000);
  for (const uint64_t lie : {uint64_t{4097}, uint64_t{5000}, ~uint64_t{0}, uint64_t{1} << 63}) {
    ShmWorld world(2);
    world.arena(0).mailbox_counters(1, 0, 0).sent.store(lie);
    EXPECT_THROW(world.rank(0).try_receive(1, Lane::kCollective, buffer), c10::DistNetworkError) << lie;
    world.arena(0).mailbox_counters(0, 1, 0).received.store(lie);
    EXPECT_THROW(world.rank(0).try_send(1, Lane::kCollective, data), c10::DistNetworkError) << lie;
  }
  ShmWorld world(2);  // and they may not go back
  EXPECT_EQ(world.rank(1).try_send(0, Lane::kCollective, std::span(data).first(100)), 100U);
  EXPECT_EQ(world.rank(0).try_receive(1, Lane::kCollective, std::span(buffer).first(10)), 10U);
  world.arena(0).mailbox_counters(1, 0, 0).sent.store(50);
  EXPECT_THROW(world.rank(0).try_receive(1, Lane::kCollective, buffer), c10::DistNetworkError);
}

TEST(ShmTransport, RingsASleepingPeerForBytesAndForRoom) {
  ShmWorld world(2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    std::vector<Descriptor> doorbells(2);
    doorbells[1 - rank].reset(::dup(process_doorbell()));
    world.arena(rank).set_doorbells(std::move(doorbells));
  }
  const auto is_rung = [] { return wait_doorbell(process_doorbell(), std::chrono::milliseconds(0)); };
  std::byte data{};
  world.arena(1).set_sleeping(true);
  world.rank(0).try_send(1, Lane::kCollective, {&data, 1});
  EXPECT_TRUE(is_rung());
  world.arena(1).set_sleeping(false);
  world.arena(0).set_sleeping(true);
  world.rank(1).try_receive(0, Lane::kCollective, {&data, 1});
  EXPECT_TRUE(is_rung());
}

TEST(ShmTransport, StreamsAmongProcessesAndSeesAKill) {
  const ArenaGeometry geometry{2, 0, 8192};
  const int fd = ShmArena::create(geometry);
  ShmArena arena(fd, geometry, 0);
  constexpr size_t kTotal = 3'000'000;
  ChildProcess child([&] {
    ShmArena own(::dup(fd), geometry, 1);
    ShmTransport transport(own);
    for (size_t sent = 0; sent < kTotal;) {
      std::byte piece[1000];
      const size_t bytes = std::min(kTotal - sent, sent % sizeof piece + 1);
      for (size_t i = 0; i < bytes; ++i) piece[i] = stream_byte(1, 0, Lane::kCollective, sent + i);
      sent += transport.try_send(0, Lane::kCollective, {piece, bytes});
    }
    while (true) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return true;
  });
  ShmTransport transport(arena);
  size_t wrong = 0;
  for (size_t received = 0; received < kTotal;) {
    std::byte piece[777];
    const size_t bytes = transport.try_receive(1, Lane::kCollective, piece);
    for (size_t i = 0; i < bytes; ++i) wrong += piece[i] != stream_byte(1, 0, Lane::kCollective, received + i);
    received += bytes;
    if (bytes == 0) std::this_thread::yield();
  }
  EXPECT_EQ(wrong, 0U);
  EXPECT_TRUE(arena.is_process_alive(1));
  child.kill();
  EXPECT_FALSE(arena.is_process_alive(1));
}

}  // namespace
}  // namespace zeropg

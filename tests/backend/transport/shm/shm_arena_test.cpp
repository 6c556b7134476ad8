#include "backend/transport/shm/shm_arena.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "backend/platform/process/doorbell.h"
#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

ArenaGeometry small(int32_t world_size) { return {world_size, 8192, 1024}; }

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// All ranks of an arena in this process.
std::vector<std::unique_ptr<ShmArena>> make_ranks(int32_t world_size) {
  const ArenaGeometry geometry = small(world_size);
  Descriptor fd(ShmArena::create(geometry));
  std::vector<std::unique_ptr<ShmArena>> ranks;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::make_unique<ShmArena>(::dup(fd.get()), geometry, rank));
    std::vector<Descriptor> doorbells(world_size);
    for (int32_t peer = 0; peer < world_size; ++peer) {
      if (peer != rank) doorbells[peer].reset(::dup(process_doorbell()));
    }
    ranks.back()->set_doorbells(std::move(doorbells));
  }
  return ranks;
}

TEST(ArenaGeometry, RefusesSizesThatNoArenaHas) {
  EXPECT_THROW((ArenaGeometry{0, 4096, 1024}.total_bytes()), c10::ValueError);
  EXPECT_THROW((ArenaGeometry{2, 4095, 1024}.total_bytes()), c10::ValueError);
  EXPECT_THROW((ArenaGeometry{2, -4096, 1024}.total_bytes()), c10::ValueError);
  EXPECT_THROW((ArenaGeometry{2, 4096, 1000}.total_bytes()), c10::ValueError);
  EXPECT_THROW((ArenaGeometry{4096, 4096, int64_t{1} << 40}.total_bytes()), c10::ValueError);
  EXPECT_GT((ArenaGeometry{1, 0, 0}.total_bytes()), 0);
  EXPECT_GT((ArenaGeometry{17, 4096, 64}.total_bytes()), 17 * 2 * 4096 + 17 * 17 * 2 * 64);
}

TEST(ShmArena, RefusesMoreMemoryThanTheMachineHas) {
  const std::string error = error_of([] { ShmArena::create({2, int64_t{1} << 40, 0}); });
  EXPECT_NE(error.find("exceeds the"), std::string::npos) << error;
}

TEST(ShmArena, DescriptorIsSealedAndClosesOnExec) {
  Descriptor fd(ShmArena::create(small(2)));
  EXPECT_NE(::ftruncate(fd.get(), 4096), 0);
  EXPECT_NE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_TRUE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);
}

TEST(ShmArena, RefusesADescriptorOfAnotherGeometry) {
  const auto open = [](int fd, const ArenaGeometry& geometry) {
    return error_of([&] { ShmArena arena(fd, geometry, 0); });
  };
  EXPECT_NE(open(ShmArena::create(small(3)), small(2)).find("expected"), std::string::npos);
  // Same size, other meaning: the header tells.
  const ArenaGeometry a{1, 4096, 8192};
  const ArenaGeometry b{1, 8192, 4096};
  ASSERT_EQ(a.total_bytes(), b.total_bytes());
  EXPECT_NE(open(ShmArena::create(a), b).find("made for world_size 1, bank_bytes 4096"), std::string::npos);
  const int unsealed = ::memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(unsealed, small(2).total_bytes()), 0);
  EXPECT_NE(open(unsealed, small(2)).find("not sealed"), std::string::npos);
  const int blank = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(blank, small(2).total_bytes()), 0);
  ASSERT_EQ(::fcntl(blank, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_NE(open(blank, small(2)).find("made for world_size 0"), std::string::npos);
}

TEST(ShmArena, RegionsDoNotOverlap) {
  auto ranks = make_ranks(3);
  std::vector<std::pair<std::byte*, size_t>> regions;
  for (int32_t rank = 0; rank < 3; ++rank) {
    for (const uint64_t sequence : {0, 1}) {
      const auto slot = ranks[0]->slot(rank, sequence);
      regions.emplace_back(slot.data(), slot.size());
    }
    for (const int32_t bank : {0, 1}) regions.emplace_back(ranks[0]->staging(rank, bank), 8192);
    for (int32_t peer = 0; peer < 3; ++peer) {
      for (const int32_t lane : {0, 1}) {
        regions.emplace_back(ranks[0]->mailbox(rank, peer, lane), 1024);
        regions.emplace_back(reinterpret_cast<std::byte*>(&ranks[0]->mailbox_counters(rank, peer, lane)), 128);
      }
    }
  }
  std::sort(regions.begin(), regions.end());
  for (size_t i = 1; i < regions.size(); ++i) EXPECT_LE(regions[i - 1].first + regions[i - 1].second, regions[i].first);
  for (const auto& [data, bytes] : regions) std::memset(data, 0xff, bytes);
  for (int32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[0]->state_of(rank), RankState::kAlive);
  EXPECT_TRUE(ranks[0]->all_arrived(0));
  EXPECT_FALSE(ranks[0]->all_arrived(1));
}

TEST(ShmArena, BarrierIsPassedWhenAllHaveArrived) {
  auto ranks = make_ranks(3);
  ranks[0]->arrive(1);
  ranks[2]->arrive(2);
  EXPECT_FALSE(ranks[0]->all_arrived(1));
  EXPECT_EQ(ranks[0]->missing(1), (std::vector<int32_t>{1}));
  EXPECT_EQ(ranks[0]->missing(2), (std::vector<int32_t>{0, 1}));
  ranks[1]->arrive(1);
  EXPECT_TRUE(ranks[2]->all_arrived(1));
}

TEST(ShmArena, BarrierPublishesStagingBytesAmongThreads) {
  constexpr int kRanks = 4;
  auto ranks = make_ranks(kRanks);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (uint64_t round = 1; round <= 200; ++round) {
        std::memcpy(ranks[rank]->staging(rank, round % 2), &round, sizeof round);
        ranks[rank]->arrive(round);
        while (!ranks[rank]->all_arrived(round)) std::this_thread::yield();
        for (int peer = 0; peer < kRanks; ++peer) {
          uint64_t seen = 0;
          std::memcpy(&seen, ranks[rank]->staging(peer, round % 2), sizeof seen);
          if (seen != round) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ShmArena, AWaitIsKnownToOthersAndForgottenWhenItIsNotSaidAgain) {
  auto ranks = make_ranks(3);
  EXPECT_EQ(ranks[0]->notes_of(1).wait(Lane::kCollective), std::nullopt);
  ranks[1]->notes_of(1).note_wait(Lane::kPointToPoint, 0);
  ranks[1]->notes_of(1).note_wait(Lane::kCollective, 2);
  EXPECT_EQ(ranks[0]->notes_of(1).wait(Lane::kCollective), 2);
  ranks[1]->notes_of(1).note_wait(Lane::kPointToPoint, 0);  // again: this thread may have been held up
  EXPECT_EQ(ranks[0]->notes_of(1).wait(Lane::kPointToPoint), 0);
  ranks[2]->notes_of(2).note_wait(Lane::kCollective, RankNotes::kAtBarrier);
  EXPECT_EQ(ranks[0]->notes_of(2).wait(Lane::kCollective), RankNotes::kAtBarrier);
  ranks[0]->arrive(1);
  ranks[2]->arrive(1);
  EXPECT_EQ(ranks[0]->missing_for(2), std::vector<int32_t>{1});
  std::this_thread::sleep_for(2 * RankNotes::kWaitLife);
  EXPECT_EQ(ranks[0]->notes_of(1).wait(Lane::kCollective), std::nullopt);
}

TEST(ShmArena, FirstErrorWinsAndIsFinal) {
  auto ranks = make_ranks(2);
  ranks[0]->set_state(RankState::kFailed, "first\nerror");
  ranks[0]->set_state(RankState::kFailed, "second");
  ranks[0]->set_state(RankState::kDeparted);
  EXPECT_EQ(ranks[1]->state_of(0), RankState::kFailed);
  EXPECT_EQ(ranks[1]->failure_of(0), "first error");
  EXPECT_EQ(ranks[1]->failure_of(1), "");
}

TEST(ShmArena, LongErrorsAreCut) {
  auto ranks = make_ranks(2);
  ranks[0]->set_state(RankState::kFailed, std::string(100000, 'x'));
  EXPECT_EQ(ranks[1]->failure_of(0).size(), ShmArena::kFailureBytes);
}

TEST(ShmArena, DestructionDeparts) {
  auto ranks = make_ranks(2);
  ranks[0].reset();
  EXPECT_EQ(ranks[1]->state_of(0), RankState::kDeparted);
}

TEST(ShmArena, OnlySleepersAreRung) {
  auto ranks = make_ranks(2);
  while (wait_doorbell(process_doorbell(), milliseconds(0))) {
  }
  ranks[0]->arrive(1);
  ranks[1]->arrive(1);
  EXPECT_FALSE(wait_doorbell(process_doorbell(), milliseconds(0)));
  ranks[0]->set_sleeping(true);
  ranks[0]->arrive(2);
  EXPECT_FALSE(wait_doorbell(process_doorbell(), milliseconds(0))) << "nobody can go on yet";
  ranks[1]->arrive(2);
  EXPECT_TRUE(wait_doorbell(process_doorbell(), milliseconds(0)));
  ranks[1]->set_state(RankState::kFailed, "x");
  EXPECT_TRUE(wait_doorbell(process_doorbell(), milliseconds(0)));
  ranks[0]->set_sleeping(false);
  ranks[0]->arrive(3);
  ranks[1]->arrive(3);
  EXPECT_FALSE(wait_doorbell(process_doorbell(), milliseconds(0)));
}

// Processes that always doze, as threads of the program do: one lost wake-up and the test fails.
TEST(ShmArena, NoWakeUpOfADozerIsLost) {
  constexpr int32_t kRanks = 3;
  constexpr uint64_t kRounds = 3000;
  const ArenaGeometry geometry = small(kRanks);
  const int fd = ShmArena::create(geometry);
  const auto play = [&](int32_t rank, int arena_fd) {
    ShmArena arena(arena_fd, geometry, rank);
    for (uint64_t round = 1; round <= kRounds; ++round) {
      arena.arrive(round);
      const auto start = std::chrono::steady_clock::now();
      while (!arena.all_arrived(round)) {
        arena.doze(start + milliseconds(20000), [&] { return arena.all_arrived(round); });
        if (std::chrono::steady_clock::now() - start > milliseconds(15000)) return false;
      }
    }
    return true;
  };
  ChildProcess first([&] { return play(1, ::dup(fd)); });
  ChildProcess second([&] { return play(2, ::dup(fd)); });
  EXPECT_TRUE(play(0, fd));
  EXPECT_TRUE(first.succeeded());
  EXPECT_TRUE(second.succeeded());
}

// The first thread has looked, is called, and a second one comes to doze before the first one sleeps.
TEST(ShmArena, ADozerIsNotSentBackToSleepByAnotherOne) {
  const ArenaGeometry geometry = small(2);
  const int fd = ShmArena::create(geometry);
  ShmArena arena(::dup(fd), geometry, 0);
  ShmArena peer(fd, geometry, 1);
  const auto start = std::chrono::steady_clock::now();
  arena.doze(start + milliseconds(5000), [&] {
    peer.ring(0);
    std::thread([&] { arena.doze(start, [] { return true; }); }).join();
    return false;
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(4000));
}

// Two processes that always sleep and never look on their own: one lost wake-up and the test fails.
TEST(ShmArena, NoWakeUpIsLost) {
  constexpr uint64_t kRounds = 3000;
  const ArenaGeometry geometry = small(2);
  const int fd = ShmArena::create(geometry);
  const int bells[2] = {::eventfd(0, EFD_NONBLOCK), ::eventfd(0, EFD_NONBLOCK)};
  const auto play = [&](int32_t rank, int arena_fd) {
    ShmArena arena(arena_fd, geometry, rank);
    std::vector<Descriptor> doorbells(2);
    doorbells[1 - rank].reset(::dup(bells[1 - rank]));
    arena.set_doorbells(std::move(doorbells));
    for (uint64_t round = 1; round <= kRounds; ++round) {
      arena.arrive(round);
      while (!arena.all_arrived(round)) {
        arena.set_sleeping(true);
        const bool is_late = !arena.all_arrived(round) && !wait_doorbell(bells[rank], milliseconds(20000));
        arena.set_sleeping(false);
        if (is_late && !arena.all_arrived(round)) return false;
      }
    }
    return true;
  };
  ChildProcess child([&] { return play(1, ::dup(fd)); });
  EXPECT_TRUE(play(0, fd));
  EXPECT_TRUE(child.succeeded());
  for (const int bell : bells) ::close(bell);
}

TEST(ShmArena, RanksOfOneProcessAreAliveToEachOther) {
  auto ranks = make_ranks(2);
  EXPECT_TRUE(ranks[0]->is_process_alive(0));
  EXPECT_TRUE(ranks[0]->is_process_alive(1));
}

// Children synchronise through the arena itself: arrive(1) says "I have mapped it".
void wait_for_arrival(const ShmArena& arena, uint64_t count) {
  while (!arena.all_arrived(count)) std::this_thread::sleep_for(milliseconds(1));
}

TEST(ShmArena, KilledProcessIsNotAliveEvenWhileItsOwnChildrenLive) {
  const ArenaGeometry geometry = small(3);
  const int fd = ShmArena::create(geometry);
  ShmArena arena(fd, geometry, 0);
  EXPECT_TRUE(arena.is_process_alive(1)) << "a rank that has not joined is not dead";
  const auto join = [&](int32_t rank) {
    return [&, rank] {
      ShmArena own(::dup(fd), geometry, rank);
      // A worker of its own, as data loaders fork them; it keeps every descriptor and lives until it is told.
      if (rank == 1 && ::fork() == 0) {
        ::alarm(60);
        while (arena.state_of(0) == RankState::kAlive) std::this_thread::sleep_for(milliseconds(1));
        ::_exit(0);
      }
      own.arrive(1);
      while (true) std::this_thread::sleep_for(milliseconds(100));
      return true;
    };
  };
  ChildProcess first(join(1));
  ChildProcess second(join(2));
  arena.arrive(1);
  wait_for_arrival(arena, 1);
  EXPECT_TRUE(arena.is_process_alive(1));
  EXPECT_TRUE(arena.is_process_alive(2));
  first.kill();
  EXPECT_FALSE(arena.is_process_alive(1));
  EXPECT_TRUE(arena.is_process_alive(2));
  second.kill();
  EXPECT_FALSE(arena.is_process_alive(2));
  arena.set_state(RankState::kDeparted);
}

TEST(ShmArena, LockSurvivesTheEndOfAnotherRankInTheSameProcess) {
  const ArenaGeometry geometry = small(3);
  const int fd = ShmArena::create(geometry);
  auto arena = std::make_unique<ShmArena>(fd, geometry, 0);
  ChildProcess child([&] {
    ShmArena own(::dup(fd), geometry, 2);
    own.arrive(1);
    // A rank says that it departs before it lets go of its lock.
    while (own.state_of(1) != RankState::kDeparted || own.is_process_alive(1)) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    const bool is_right = own.is_process_alive(0);
    own.arrive(2);
    return is_right;
  });
  {
    ShmArena other(::dup(fd), geometry, 1);
    other.arrive(2);
    arena->arrive(2);
    wait_for_arrival(*arena, 1);
  }  // closes a descriptor of the same memfd, the classic trap
  wait_for_arrival(*arena, 2);
  EXPECT_TRUE(child.succeeded());
}

TEST(ShmArena, RingsOfManyRanksTakeNoMoreThanThoseOf64) {
  constexpr int64_t kUsual = 256 << 10;
  EXPECT_EQ(shared_mailbox_bytes(kUsual, 64), kUsual);
  EXPECT_EQ(shared_mailbox_bytes(0, 4096), 0);
  const int64_t of_64 = ArenaGeometry{64, 0, kUsual}.total_bytes();
  for (const int32_t ranks : {65, 90, 128, 255, 512}) {
    const ArenaGeometry geometry{ranks, 0, shared_mailbox_bytes(kUsual, ranks)};  // a power of two, or it throws
    EXPECT_LE(geometry.total_bytes(), of_64 + ranks * ranks * 256 + (4 << 20)) << ranks;
  }
  EXPECT_EQ(shared_mailbox_bytes(int64_t{1} << 40, 4096), (int64_t{1} << 40) / 4096);
  EXPECT_EQ(shared_mailbox_bytes(kUsual, 4096), 4096);
}

TEST(ShmArena, TwoProcessesCannotBeTheSameRank) {
  const ArenaGeometry geometry = small(2);
  const int fd = ShmArena::create(geometry);
  ShmArena arena(fd, geometry, 1);
  ChildProcess child([&] {
    return error_of([&] { ShmArena thief(::dup(fd), geometry, 1); }).find("already is rank 1") != std::string::npos;
  });
  EXPECT_TRUE(child.succeeded());
}

TEST(ShmArena, ForkedCopyDoesNotDepartForItsParent) {
  const ArenaGeometry geometry = small(1);
  auto arena = std::make_unique<ShmArena>(ShmArena::create(geometry), geometry, 0);
  ChildProcess child([&] {
    arena.reset();
    return true;
  });
  EXPECT_TRUE(child.succeeded());
  EXPECT_EQ(arena->state_of(0), RankState::kAlive);
}

}  // namespace
}  // namespace zeropg

#include "backend/transport/shm/cpu_balancer.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <thread>

#include "backend/platform/cpu/affinity.h"
#include "backend/transport/shm/shm_arena.h"

namespace zeropg {
namespace {

using Clock = std::chrono::steady_clock;

TEST(EmptierCpu, IsForTheLastRankOfAFullerOne) {
  EXPECT_EQ(emptier_cpu(3, {0, 0, 1, 0}, {0, 1}), 1);
  EXPECT_EQ(emptier_cpu(0, {0, 0, 1, 0}, {0, 1}), -1);
  EXPECT_EQ(emptier_cpu(1, {0, 0, 1, 0}, {0, 1}), -1);
  EXPECT_EQ(emptier_cpu(2, {0, 0, 1, 0}, {0, 1}), -1);
}

TEST(EmptierCpu, IsNotWhereOneRankMoreWouldBeAsBad) {
  EXPECT_EQ(emptier_cpu(2, {0, 1, 0}, {0, 1}), -1);
  EXPECT_EQ(emptier_cpu(3, {0, 1, 0, 1}, {0, 1}), -1);
}

TEST(EmptierCpu, IsTheEmptiestThatTheRankMayRunOn) {
  EXPECT_EQ(emptier_cpu(4, {5, 5, 5, 2, 5}, {2, 5, 7}), 7);
  EXPECT_EQ(emptier_cpu(4, {5, 5, 5, 2, 5}, {2, 5}), 2);
  EXPECT_EQ(emptier_cpu(4, {5, 5, 5, 2, 5}, {5}), -1);
  EXPECT_EQ(emptier_cpu(4, {5, 5, 5, 2, 5}, {}), -1);
}

// Two ranks of an arena; this thread is rank 1.
struct Pair {
  ArenaGeometry geometry{2, 4096, 0};
  int fd = ShmArena::create(geometry);
  ShmArena other{::dup(fd), geometry, 0};
  ShmArena own{fd, geometry, 1};
  CpuBalancer spread{own};

  // Whether this thread leaves the CPU that it is on, where the other rank seems to be, too.
  bool moves_within(std::chrono::milliseconds limit) {
    const std::vector<int32_t> allowed = allowed_cpus();
    move_to_cpu(allowed[0]);
    for (const auto start = Clock::now(); Clock::now() - start < limit;) {
      other.notes_of(other.rank()).note_cpu(allowed[0]);
      spread.look(Clock::now());
      if (::sched_getcpu() != allowed[0]) return true;
    }
    return false;
  }
};

TEST(CpuBalancer, MovesAThreadThatSharesItsCpuAndDoesNotBindIt) {
  const std::vector<int32_t> allowed = allowed_cpus();
  if (allowed.size() < 2) GTEST_SKIP() << "one CPU";
  EXPECT_TRUE(Pair().moves_within(std::chrono::seconds(5)));
  EXPECT_EQ(allowed_cpus(), allowed);
}

TEST(CpuBalancer, LeavesAThreadWhereItIsBound) {
  const std::vector<int32_t> allowed = allowed_cpus();
  std::thread bound([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(allowed[0]), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_FALSE(Pair().moves_within(std::chrono::milliseconds(50)));
    EXPECT_EQ(allowed_cpus(), std::vector<int32_t>{allowed[0]});
    EXPECT_FALSE(move_to_cpu(allowed.back() == allowed[0] ? allowed[0] + 1 : allowed.back()));
  });
  bound.join();
}

}  // namespace
}  // namespace zeropg

#include "backend/platform/cpu/cgroup.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>

namespace zeropg {
namespace {

// A machine of our own making.
class Cgroup : public ::testing::Test {
 protected:
  Cgroup() {
    char pattern[] = "/tmp/zeropg_cgroup_test_XXXXXX";
    root_ = ::mkdtemp(pattern);
    files_ = {root_ / "proc", root_ / "cgroup"};
  }
  ~Cgroup() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  std::filesystem::path root_;
  MachineFiles files_;
};

TEST_F(Cgroup, NothingToReadMeansNoLimit) {
  EXPECT_EQ(memory_limit_bytes(files_), std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(std::isinf(cpu_limit(files_)));
}

TEST_F(Cgroup, PhysicalMemoryIsALimit) {
  write("proc/meminfo", "MemTotal:       16 kB\nMemFree: 1 kB\n");
  EXPECT_EQ(memory_limit_bytes(files_), 16 * 1024);
}

TEST_F(Cgroup, AvailableIsWhatTheLimitsLeaveAndCachedFilesDoNotCount) {
  EXPECT_EQ(memory_available_bytes(files_), std::numeric_limits<int64_t>::max());
  write("proc/meminfo", "MemTotal: 64 kB\nMemAvailable:   32 kB\n");
  EXPECT_EQ(memory_available_bytes(files_), 32 * 1024);
  write("proc/self/cgroup", "0::/job\n");
  write("cgroup/job/memory.max", "20000\n");
  write("cgroup/job/memory.current", "15000\n");
  EXPECT_EQ(memory_available_bytes(files_), 5000);
  write("cgroup/job/memory.stat", "active_file 7\ninactive_file 1000\n");
  EXPECT_EQ(memory_available_bytes(files_), 6000);
  write("cgroup/job/memory.current", "30000\n");
  EXPECT_EQ(memory_available_bytes(files_), 0);
  write("proc/self/cgroup", "4:memory:/old\n");
  write("cgroup/memory/old/memory.limit_in_bytes", "10000\n");
  write("cgroup/memory/old/memory.usage_in_bytes", "9000\n");
  write("cgroup/memory/old/memory.stat", "total_inactive_file 500\n");
  EXPECT_EQ(memory_available_bytes(files_), 1500);
}

TEST_F(Cgroup, UnifiedTakesTheSmallestUpTheTree) {
  write("proc/self/cgroup", "0::/job/step\n");
  write("cgroup/job/step/cpu.max", "max 100000\n");
  write("cgroup/job/cpu.max", "250000 100000\n");
  write("cgroup/job/step/memory.max", "4096\n");
  write("cgroup/job/memory.max", "max\n");
  EXPECT_DOUBLE_EQ(cpu_limit(files_), 2.5);
  EXPECT_EQ(memory_limit_bytes(files_), 4096);
}

TEST_F(Cgroup, VersionOneHasAMountPerController) {
  write("proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/\n");
  // Inside a container the host's path does not exist; the mount's root is the container's own group.
  write("cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n");
  write("cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  write("cgroup/memory/memory.limit_in_bytes", "8192\n");
  EXPECT_DOUBLE_EQ(cpu_limit(files_), 1.5);
  EXPECT_EQ(memory_limit_bytes(files_), 8192);
}

TEST_F(Cgroup, QuotaOfMinusOneIsNone) {
  write("proc/self/cgroup", "3:cpu:/\n");
  write("cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_TRUE(std::isinf(cpu_limit(files_)));
}

TEST_F(Cgroup, GarbageIsNoLimit) {
  write("proc/self/cgroup", "nonsense\n0:\n0::/../../x\n::::\n");
  write("cgroup/cpu.max", "a b c\n");
  write("cgroup/memory.max", "-5\n");
  EXPECT_TRUE(std::isinf(cpu_limit(files_)));
  EXPECT_EQ(memory_limit_bytes(files_), std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace zeropg

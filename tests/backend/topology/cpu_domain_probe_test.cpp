#include "backend/topology/cpu_domain_probe.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace zeropg {
namespace {

// A /sys/devices/system of our own: two NUMA nodes of eight CPUs, each with two level 3 caches, unless it is emptied.
class DomainProbe : public ::testing::Test {
 protected:
  DomainProbe() : root_(std::filesystem::path(::testing::TempDir()) / "zeropg-domain-probe") {
    std::filesystem::remove_all(root_);
    for (int32_t cpu = 0; cpu < 16; ++cpu) {
      const std::string first = std::to_string(cpu / 4 * 4);
      write(cache(cpu, 0) + "/level", "1");
      write(cache(cpu, 0) + "/shared_cpu_list", std::to_string(cpu));
      write(cache(cpu, 3) + "/level", "3");
      write(cache(cpu, 3) + "/shared_cpu_list", first + "-" + std::to_string(cpu / 4 * 4 + 3));
    }
    write("node/node0/cpulist", "0-7");
    write("node/node1/cpulist", "8,9-14,15");
    write("node/online", "0-1");
  }
  ~DomainProbe() override { std::filesystem::remove_all(root_); }

  static std::string cache(int32_t cpu, int32_t index) {
    return "cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index);
  }
  void write(const std::string& path, const std::string& line) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << line << '\n';
  }
  std::string of(const std::vector<int32_t>& cpus) const { return domain_id_of(cpus, root_); }

  const std::filesystem::path root_;
};

TEST_F(DomainProbe, IsTheCacheThatAllCpusShare) {
  EXPECT_EQ(of({0}), "cache:0-3");
  EXPECT_EQ(of({1, 3}), "cache:0-3");
  EXPECT_EQ(of({12, 13, 14, 15}), "cache:12-15");
}

TEST_F(DomainProbe, IsTheNumaNodeOfCpusThatShareNoCache) {
  EXPECT_EQ(of({3, 4}), "memory:0");
  EXPECT_EQ(of({8, 12}), "memory:1");
  std::filesystem::remove_all(root_ / "cpu");
  EXPECT_EQ(of({5}), "memory:0");
}

TEST_F(DomainProbe, IsNoneOfCpusHereAndThere) {
  EXPECT_EQ(of({0, 8}), "");
  EXPECT_EQ(of({}), "");
  EXPECT_EQ(of({99}), "");
}

TEST_F(DomainProbe, TakesWhatItCannotReadForNothing) {
  write(cache(0, 3) + "/shared_cpu_list", "0-");
  EXPECT_EQ(of({0}), "memory:0");
  write(cache(0, 3) + "/shared_cpu_list", "garbage");
  write("node/node0/cpulist", "");
  EXPECT_EQ(of({0}), "");
  std::filesystem::remove_all(root_);
  EXPECT_EQ(of({0}), "");
}

TEST_F(DomainProbe, OfThisProcessIsTheSameTwice) { EXPECT_EQ(probe_domain_id(), probe_domain_id()); }

}  // namespace
}  // namespace zeropg

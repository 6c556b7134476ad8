// One-sided reads through a group of two processes on two nodes: the owner's thread computes all the while and calls
// nothing of the group, so that its progress thread alone can have served them.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "backend/process_group/process_group.h"
#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

constexpr uint64_t kRegion = 3;
constexpr size_t kNumel = 1 << 20;

// Memory that both processes see.
struct Shared {
  std::atomic<bool> has_begun{false};  // the owner computes
  std::atomic<bool> has_read{false};   // the reader has what it wanted
};

c10::intrusive_ptr<ProcessGroupZero> join(const std::string& path, int rank) {
  const auto options = c10::make_intrusive<BackendOptions>(std::chrono::seconds(50));
  options->network = NetworkKind::kTcp;
  options->host_id = rank == 0 ? "owner's" : "reader's";
  options->secret = "one for both";
  return c10::make_intrusive<ProcessGroupZero>(c10::make_intrusive<c10d::FileStore>(path, 2), rank, 2, options);
}

std::vector<double> values() {
  std::vector<double> values(kNumel);
  std::iota(values.begin(), values.end(), 0.5);
  return values;
}

bool own(const std::string& path, Shared& shared) {
  const auto group = join(path, 0);
  const std::vector<double> memory = values();
  group->remote_memory()->register_region(kRegion, std::as_bytes(std::span(memory)));
  group->barrier()->wait();
  double result = 1.0;
  while (!shared.has_read.load()) {
    result = std::cos(result);
    shared.has_begun = true;
  }
  group->remote_memory()->unregister_region(kRegion);
  group->barrier()->wait();
  group->shutdown();
  return result != 0.0;
}

bool read(const std::string& path, Shared& shared) {
  const auto group = join(path, 1);
  group->barrier()->wait();
  while (!shared.has_begun.load()) std::this_thread::yield();
  RemoteMemory& memory = *group->remote_memory();
  constexpr size_t kFirst = 12345;
  std::vector<double> read(kNumel - kFirst);
  const uint64_t ticket =
      memory.start_get(0, kRegion, kFirst * sizeof(double), std::as_writable_bytes(std::span(read)));
  while (!memory.is_complete(ticket)) std::this_thread::yield();
  shared.has_read = true;
  group->barrier()->wait();
  group->shutdown();
  return std::equal(read.begin(), read.end(), values().begin() + kFirst);
}

TEST(RemoteMemory, IsReadWhileItsOwnerComputes) {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Shared& shared = *new (memory) Shared;
  std::string folder = ::testing::TempDir() + "remote-memory-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/store";
  ChildProcess owner([&] { return own(path, shared); });
  ChildProcess reader([&] { return read(path, shared); });
  EXPECT_TRUE(reader.succeeded());
  shared.has_read = true;  // in any case
  EXPECT_TRUE(owner.succeeded());
  ::unlink(path.c_str());
  ::rmdir(folder.c_str());
  ::munmap(memory, sizeof(Shared));
}

}  // namespace
}  // namespace zeropg

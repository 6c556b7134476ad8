#include "backend/transport/shm/shm_remote_memory.h"

#include <unistd.h>

#include "tests/backend/transport/remote_memory_suite.h"

namespace zeropg {
namespace {

class ShmMemoryWorld final : public RemoteMemoryWorld {
 public:
  static constexpr int64_t kBytes = 1 << 20;

  explicit ShmMemoryWorld(int32_t world_size) : used_(world_size) {
    const int fd = SharedSegment::create(world_size, kBytes);
    for (int32_t rank = 0; rank < world_size; ++rank) {
      segments_.push_back(std::make_unique<SharedSegment>(::dup(fd), rank, world_size, kBytes, nullptr));
      memories_.push_back(std::make_unique<ShmRemoteMemory>(*segments_.back()));
    }
    ::close(fd);
  }
  RemoteMemory& memory_of(int32_t rank) override { return *memories_[rank]; }
  std::span<std::byte> allocate(int32_t rank, size_t bytes) override {
    return {segments_[rank]->data() + rank * kBytes + std::exchange(used_[rank], used_[rank] + bytes), bytes};
  }

 private:
  std::vector<std::unique_ptr<SharedSegment>> segments_;
  std::vector<std::unique_ptr<ShmRemoteMemory>> memories_;
  std::vector<size_t> used_;
};

std::unique_ptr<RemoteMemoryWorld> make_shm_memory(int32_t world_size) {
  return std::make_unique<ShmMemoryWorld>(world_size);
}

INSTANTIATE_TEST_SUITE_P(Shm, RemoteMemorySuite, ::testing::Values(make_shm_memory));

TEST(ShmRemoteMemory, RefusesMemoryThatIsNotShared) {
  ShmMemoryWorld world(2);
  std::vector<std::byte> own(10);
  EXPECT_THROW(world.memory_of(0).register_region(1, own), c10::ValueError);
  EXPECT_THROW(world.memory_of(0).register_region(1, world.allocate(1, 10)), c10::ValueError);
}

}  // namespace
}  // namespace zeropg

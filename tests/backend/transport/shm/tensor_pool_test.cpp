#include "backend/transport/shm/tensor_pool.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "backend/platform/memory/sealed_memory.h"
#include "backend/platform/process/descriptor.h"
#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

std::vector<std::unique_ptr<TensorPool>> make_ranks(int32_t world_size, int64_t bytes_per_rank) {
  const Descriptor fd(TensorPool::create(world_size, bytes_per_rank));
  std::vector<std::unique_ptr<TensorPool>> ranks;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::make_unique<TensorPool>(fd.get(), rank, world_size));
  }
  return ranks;
}

TEST(TensorPoolTest, PeersFindABlockByItsOffset) {
  const auto ranks = make_ranks(3, 1 << 20);
  ranks[0]->allocate(100);
  std::byte* block = ranks[1]->allocate(1000);
  std::memset(block, 7, 1000);
  const int64_t offset = ranks[1]->offset_of(block + 10, 990);
  EXPECT_EQ(offset, 10);
  EXPECT_EQ(std::memcmp(ranks[2]->at(1, offset, 990), block + 10, 990), 0);
  EXPECT_EQ(ranks[1]->at(1, offset, 990), block + 10);
}

TEST(TensorPoolTest, OffsetsOutsideOfAPartAreRefused) {
  const auto ranks = make_ranks(2, 8192);
  const TensorPool& pool = *ranks[0];
  EXPECT_NE(pool.at(1, 0, 8192), nullptr);
  EXPECT_NE(pool.at(1, 8192, 0), nullptr);
  for (const int64_t bad : {int64_t{-1}, int64_t{1}, int64_t{8193}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(pool.at(1, bad, 8192), nullptr) << bad;
  }
  EXPECT_EQ(pool.at(1, 0, -1), nullptr);
  EXPECT_EQ(pool.at(1, 1, INT64_MAX), nullptr);
  EXPECT_EQ(pool.at(2, 0, 1), nullptr);
  EXPECT_EQ(pool.at(-1, 0, 1), nullptr);
  const std::byte elsewhere{};
  EXPECT_EQ(pool.offset_of(&elsewhere, 1), -1);
  EXPECT_EQ(pool.offset_of(nullptr, 0), -1);
  EXPECT_EQ(pool.offset_of(pool.at(1, 0, 1), 1), -1);  // of another rank
  EXPECT_EQ(pool.offset_of(pool.at(0, 1, 1), 8192), -1);
  EXPECT_EQ(pool.offset_of(pool.at(0, 1, 1), 8191), 1);
}

TEST(TensorPoolTest, AHeldBlockIsFreedWhenAllHaveLetGo) {
  const auto ranks = make_ranks(3, 1 << 20);
  TensorPool& owner = *ranks[1];
  std::byte* block = owner.allocate_held(1000, 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % TensorPool::kAlignment, 0);
  std::memset(block, 7, 1000);
  const int64_t offset = owner.offset_of(block, 1000);
  const auto is_taken = [&] {  // by what is allocated next
    std::byte* other = owner.allocate_held(1000, 1);
    const bool is_same = other == block;
    owner.let_go(other);
    return is_same;
  };
  owner.let_go(block);
  ranks[0]->let_go(ranks[0]->at(1, offset, 1000));
  EXPECT_FALSE(is_taken());
  EXPECT_FALSE(is_taken());
  EXPECT_EQ(std::count(block, block + 1000, std::byte{7}), 1000);
  ranks[2]->let_go(ranks[2]->at(1, offset, 1000));
  EXPECT_TRUE(is_taken());
  block = owner.allocate_held(1000, 3);
  owner.let_all_go(block);
  EXPECT_TRUE(is_taken());
}

TEST(TensorPoolTest, BlocksAreAlignedApartAndUsedAgain) {
  const auto ranks = make_ranks(1, 4 << 20);
  TensorPool& pool = *ranks[0];
  std::mt19937 random(1);
  struct Block {
    std::byte* data;
    int64_t bytes;
    std::byte mark;
  };
  std::vector<Block> blocks;
  for (int turn = 0; turn < 4000; ++turn) {
    if (blocks.size() < 30 && random() % 2 == 0) {
      const auto bytes = static_cast<int64_t>(random() % (random() % 4 == 0 ? 60'000 : 500));
      const auto mark = static_cast<std::byte>(random());
      std::byte* data = pool.allocate(bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % TensorPool::kAlignment, 0);
      std::memset(data, static_cast<int>(mark), bytes);
      blocks.push_back({data, bytes, mark});
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block& block = blocks.back();
      EXPECT_TRUE(std::all_of(block.data, block.data + block.bytes, [&](std::byte b) { return b == block.mark; }));
      pool.free(block.data);
      blocks.pop_back();
    }
  }
  for (const Block& block : blocks) pool.free(block.data);
  EXPECT_LE(pool.populated_bytes(), 2 << 20);
  // All of it is one free block again.
  std::byte* whole = pool.allocate(pool.bytes_per_rank());
  EXPECT_EQ(pool.offset_of(whole, pool.bytes_per_rank()), 0);
}

TEST(TensorPoolTest, LackOfRoomIsAnErrorThatSaysWhatToDo) {
  const auto ranks = make_ranks(2, 1 << 20);
  std::byte* half = ranks[0]->allocate(600'000);
  for (const int64_t bytes : {int64_t{500'032}, int64_t{2} << 20, INT64_MAX}) {
    try {
      ranks[0]->allocate(bytes);
      FAIL() << bytes;
    } catch (const c10::DistBackendError& error) {
      EXPECT_NE(std::string(error.what()).find("pool_bytes"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
    }
  }
  EXPECT_NE(ranks[1]->allocate(500'000), nullptr);  // a part of its own
  ranks[0]->free(half);
  EXPECT_NE(ranks[0]->allocate(1 << 20), nullptr);
  EXPECT_THROW(ranks[0]->allocate(1), c10::DistBackendError);
  EXPECT_THROW(ranks[0]->allocate(-1), c10::ValueError);
}

TEST(TensorPoolTest, MemoryThatTheMachineLacksIsAnErrorToo) {
  const auto ranks = make_ranks(1, TensorPool::share_of_memory(1));
  const int64_t before = ranks[0]->populated_bytes();
  EXPECT_THROW(ranks[0]->allocate(ranks[0]->bytes_per_rank()), c10::DistBackendError);  // this process has some of it
  EXPECT_EQ(ranks[0]->populated_bytes(), before);
  EXPECT_NE(ranks[0]->allocate(100), nullptr);
}

TEST(TensorPoolTest, APoolWithoutMemoryRefusesEverything) {
  for (const int32_t world_size : {1, 4}) {
    const auto ranks = make_ranks(world_size, 0);
    EXPECT_EQ(ranks[0]->bytes_per_rank(), 0);
    EXPECT_THROW(ranks[0]->allocate(1), c10::DistBackendError);
    const std::byte elsewhere{};
    EXPECT_EQ(ranks[0]->offset_of(&elsewhere, 1), -1);
  }
}

TEST(TensorPoolTest, RefusesImpossibleSizesAndForeignDescriptors) {
  EXPECT_THROW(TensorPool::create(2, -1), c10::ValueError);
  EXPECT_THROW(TensorPool::create(2, INT64_MAX / 2), c10::ValueError);
  EXPECT_THROW(TensorPool::create(2, INT64_MAX), c10::ValueError) << "a page more wraps around";
  const Descriptor unsealed(::open("/dev/null", O_RDWR));
  EXPECT_THROW(TensorPool(unsealed.get(), 0, 1), c10::DistBackendError);
}

TEST(TensorPoolTest, ManyThreadsMayAllocate) {
  const auto ranks = make_ranks(1, 64 << 20);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&pool = *ranks[0], thread] {
      for (int i = 1; i < 500; ++i) {
        std::byte* block = pool.allocate(i * 37);
        std::memset(block, thread, i * 37);
        EXPECT_EQ(block[i * 37 - 1], static_cast<std::byte>(thread));
        pool.free(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(TensorPoolTest, AForkedChildLeavesThePoolAlone) {
  const auto ranks = make_ranks(1, 1 << 20);
  std::byte* block = ranks[0]->allocate(1000);
  ChildProcess child([&] {
    ranks[0]->free(block);
    return true;
  });
  EXPECT_TRUE(child.succeeded());
  ranks[0]->free(block);  // would fail, were it free already
}

}  // namespace
}  // namespace zeropg

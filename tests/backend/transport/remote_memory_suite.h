// The contract of RemoteMemory, once. An implementation instantiates it with a function that makes connected ranks:
//
//   INSTANTIATE_TEST_SUITE_P(Shm, RemoteMemorySuite, ::testing::Values(make_shm_memory_world));
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/transport/remote_memory.h"

namespace zeropg {

class RemoteMemoryWorld {
 public:
  virtual ~RemoteMemoryWorld() = default;
  virtual RemoteMemory& memory_of(int32_t rank) = 0;
  // Memory that this rank can register; lives as long as the world. The same calls on all ranks.
  virtual std::span<std::byte> allocate(int32_t rank, size_t bytes) = 0;
};

using MakeRemoteMemoryWorld = std::unique_ptr<RemoteMemoryWorld> (*)(int32_t world_size);

class RemoteMemorySuite : public ::testing::TestWithParam<MakeRemoteMemoryWorld> {
 protected:
  std::unique_ptr<RemoteMemoryWorld> make(int32_t world_size) { return GetParam()(world_size); }

  static std::byte value_of(int32_t rank, size_t i) {
    return static_cast<std::byte>(i * 2654435761U + (i >> 9) + static_cast<size_t>(rank) * 41);
  }
  // Every rank's memory under the same number.
  static void register_all(RemoteMemoryWorld& world, int32_t world_size, uint64_t region, size_t bytes) {
    for (int32_t rank = 0; rank < world_size; ++rank) {
      const std::span<std::byte> memory = world.allocate(rank, bytes);
      for (size_t i = 0; i < bytes; ++i) memory[i] = value_of(rank, i);
      world.memory_of(rank).register_region(region, memory);
    }
  }
  static void finish(RemoteMemory& memory, uint64_t ticket) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!memory.is_complete(ticket)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }
};

TEST_P(RemoteMemorySuite, ReadsAnyRangeOfAnyPeer) {
  auto world = make(3);
  constexpr size_t kBytes = 1'000'000;
  register_all(*world, 3, 5, kBytes);
  for (const auto& [offset, bytes] :
       {std::pair<size_t, size_t>{0, kBytes}, {kBytes - 1, 1}, {12'345, 700'001}, {7, 0}, {kBytes, 0}}) {
    for (int32_t rank = 0; rank < 3; ++rank) {
      const int32_t peer = (rank + 1) % 3;
      std::vector<std::byte> data(bytes);
      finish(world->memory_of(rank), world->memory_of(rank).start_get(peer, 5, offset, data));
      size_t wrong = 0;
      for (size_t i = 0; i < bytes; ++i) wrong += data[i] != value_of(peer, offset + i);
      EXPECT_EQ(wrong, 0U) << offset << " " << bytes;
    }
  }
}

TEST_P(RemoteMemorySuite, ManyReadsAtATimeFromEverybody) {
  auto world = make(3);
  register_all(*world, 3, 1, 50'000);
  struct Read {
    int32_t rank, peer;
    size_t offset;
    std::vector<std::byte> data;
    uint64_t ticket;
  };
  std::deque<Read> reads;
  for (size_t i = 0; i < 300; ++i) {
    const auto rank = static_cast<int32_t>(i % 3);
    const auto peer = static_cast<int32_t>((rank + 1 + i / 3 % 2) % 3);
    Read& read = reads.emplace_back(Read{rank, peer, i * 131, std::vector<std::byte>(i * 23), 0});
    read.ticket = world->memory_of(rank).start_get(peer, 1, read.offset, read.data);
  }
  for (Read& read : reads) {
    finish(world->memory_of(read.rank), read.ticket);
    size_t wrong = 0;
    for (size_t i = 0; i < read.data.size(); ++i) wrong += read.data[i] != value_of(read.peer, read.offset + i);
    EXPECT_EQ(wrong, 0U);
  }
}

TEST_P(RemoteMemorySuite, WhatIsNotRegisteredIsRefused) {
  auto world = make(2);
  register_all(*world, 2, 1, 1000);
  std::vector<std::byte> data(100);
  for (const auto& [region, offset] : {std::pair<uint64_t, uint64_t>{1, 901}, {1, ~uint64_t{0}}, {1, 1001}, {2, 0}}) {
    RemoteMemory& memory = world->memory_of(0);
    EXPECT_THROW(finish(memory, memory.start_get(1, region, offset, data)), c10::DistBackendError) << offset;
  }
  world->memory_of(1).unregister_region(1);
  world->memory_of(0).unregister_region(1);
  EXPECT_THROW(finish(world->memory_of(0), world->memory_of(0).start_get(1, 1, 0, data)), c10::DistBackendError);
}

TEST_P(RemoteMemorySuite, ACancelledReadWritesNothingMore) {
  auto world = make(2);
  register_all(*world, 2, 1, 1'000'000);
  std::vector<std::byte> data(1'000'000);
  RemoteMemory& memory = world->memory_of(0);
  memory.cancel_get(memory.start_get(1, 1, 0, data));
  const std::vector<std::byte> before = data;
  std::vector<std::byte> other(10);
  finish(memory, memory.start_get(1, 1, 0, other));
  EXPECT_EQ(data, before);
}

}  // namespace zeropg

// Nodes are names here; between them are TCP connections, and one engine moves what all ranks get.
#include "backend/windows/window_traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "backend/process_group/group_runtime.h"
#include "tests/backend/local_ranks.h"

namespace zeropg {
namespace {

struct Memory {
  explicit Memory(size_t bytes, size_t ranks) : data(bytes), signals(ranks) {}
  std::vector<std::byte> data;
  std::vector<std::atomic<uint64_t>> signals;
};

class WindowTrafficTest : public ::testing::Test {
 protected:
  void join(const std::vector<std::string>& hosts) {
    ranks_ = meet_on(hosts);
    for (const auto& rank : ranks_) runtimes_.push_back(GroupRuntime::open(rank, /*may_use_cma=*/true));
  }
  void TearDown() override {
    on_every_rank(static_cast<int32_t>(runtimes_.size()),
                  [&](int32_t rank) { runtimes_[rank]->close(std::chrono::milliseconds(2'000)); });
  }
  WindowTraffic& traffic(int32_t rank) { return *runtimes_[rank]->window_traffic(); }
  std::shared_ptr<Memory> open(int32_t rank, size_t bytes) {
    auto memory = std::make_shared<Memory>(bytes, ranks_.size());
    traffic(rank).open({.memory = memory,
                        .data = memory->data.data(),
                        .bytes = static_cast<int64_t>(bytes),
                        .signals = memory->signals.data()});
    return memory;
  }

  Contexts ranks_;
  std::vector<std::shared_ptr<GroupRuntime>> runtimes_;
};

TEST_F(WindowTrafficTest, WhatSeveralThreadsPutIsWholeAndBehindItsSignal) {
  join({"one", "two", "three"});
  constexpr int kThreads = 4;
  constexpr size_t kBytes = 300'001;  // more than a window of a stream takes
  std::vector<std::shared_ptr<Memory>> memories;
  for (int32_t rank = 0; rank < 3; ++rank) memories.push_back(open(rank, 3 * kThreads * kBytes));
  on_every_rank(3, [&](int32_t rank) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const std::vector<std::byte> data = pattern(kBytes, static_cast<uint64_t>(rank * kThreads + thread));
        for (int32_t peer = 0; peer < 3; ++peer) {
          if (peer == rank) continue;
          traffic(rank).put({peer, 0}, (rank * kThreads + thread) * static_cast<int64_t>(kBytes), data, kLongTimeout);
          traffic(rank).signal({peer, 0}, kLongTimeout);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int32_t peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      poll([&] { return memories[rank]->signals[peer].load(std::memory_order_acquire) == kThreads; });
      for (int thread = 0; thread < kThreads; ++thread) {
        const int slot = peer * kThreads + thread;
        const std::vector<std::byte> expected = pattern(kBytes, static_cast<uint64_t>(slot));
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), memories[rank]->data.begin() + slot * kBytes)) << slot;
      }
    }
    EXPECT_EQ(traffic(rank).sent()[(rank + 1) % 3], 2 * kThreads);
  });
  for (int32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(traffic(rank).received((rank + 1) % 3), 2 * kThreads);
}

TEST_F(WindowTrafficTest, WhatComesForAWindowThatIsGoneIsDropped) {
  join({"one", "two"});
  const auto memory = open(0, 64);
  auto gone = open(0, 64);
  gone.reset();
  const std::vector<std::byte> data = pattern(50'000, 3);
  traffic(1).put({0, 1}, 0, data, kLongTimeout);
  traffic(1).signal({0, 1}, kLongTimeout);
  traffic(1).put({0, 77}, 0, data, kLongTimeout);  // never there
  traffic(1).put({0, 0}, 8, std::span(data).first(56), kLongTimeout);
  poll([&] { return traffic(0).received(1) == 4; });
  EXPECT_TRUE(std::equal(data.begin(), data.begin() + 56, memory->data.begin() + 8));
  EXPECT_EQ(memory->signals[1], 0U);
}

TEST_F(WindowTrafficTest, WhoPutsBesideAWindowFailsTheGroup) {
  join({"one", "two"});
  const auto memory = open(0, 64);
  const std::vector<std::byte> data = pattern(65, 3);
  traffic(1).put({0, 0}, 0, data, kLongTimeout);
  poll([&] { return ranks_[0]->has_failed(); });
  expect_words(ranks_[0]->failure().text, {"put", "rank 1 puts 65 bytes at 0 of a window of 64"});
  EXPECT_TRUE(
      std::all_of(memory->data.begin(), memory->data.end(), [](std::byte byte) { return byte == std::byte{}; }));
  expect_words(error_of([&] { traffic(1).put({0, 0}, 0, std::span(data).first(1), kLongTimeout); }), {"rank 0"});
}

TEST_F(WindowTrafficTest, APutThatNobodyTakesEndsWithItsTimeout) {
  const Contexts ranks = meet_on({"one", "two"});
  const auto runtime = GroupRuntime::open(ranks[0], /*may_use_cma=*/true);  // nobody runs the other one
  const std::vector<std::byte> data(4 << 20);
  const std::string text = error_of([&] {
    runtime->window_traffic()->put({1, 0}, 0, data, std::chrono::milliseconds(300));
  });
  expect_words(text, {"put", "timed out after 300 ms in which rank 1 took nothing of it"});
  EXPECT_TRUE(ranks[0]->has_failed());  // what comes next would be taken for the rest of it
  runtime->close(std::chrono::milliseconds(0));
}

}  // namespace
}  // namespace zeropg

#include "backend/windows/signal_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace zeropg {
namespace {

TEST(SignalQueue, TheOldestWaitGetsTheSignalWhoeverLooks) {
  const auto queue = std::make_shared<SignalQueue>();
  SignalQueue::Place first(queue);
  SignalQueue::Place second(queue);
  EXPECT_FALSE(first.take(0));
  EXPECT_FALSE(second.take(1));
  EXPECT_TRUE(first.take(0)) << "it has it, whatever is told now";
  EXPECT_TRUE(second.take(2));
  EXPECT_TRUE(first.take(2));
  EXPECT_FALSE(SignalQueue::Place(queue).take(2));
}

TEST(SignalQueue, WhoeverLeavesLeavesItsSignalToTheNext) {
  const auto queue = std::make_shared<SignalQueue>();
  std::optional<SignalQueue::Place> without(queue);
  std::optional<SignalQueue::Place> unseen(queue);
  SignalQueue::Place last(queue);
  without.reset();
  EXPECT_FALSE(last.take(1));
  unseen.reset();
  EXPECT_TRUE(last.take(1));
}

TEST(SignalQueue, SignalsThatNobodyWaitsForStay) {
  const auto queue = std::make_shared<SignalQueue>();
  EXPECT_TRUE(SignalQueue::Place(queue).take(3));
  EXPECT_TRUE(SignalQueue::Place(queue).take(3));
  EXPECT_TRUE(SignalQueue::Place(queue).take(3));
  EXPECT_FALSE(SignalQueue::Place(queue).take(3));
}

TEST(SignalQueue, ThreadsThatComeAndGoTakeEachSignalOnce) {
  const auto queue = std::make_shared<SignalQueue>();
  constexpr uint64_t kSignals = 3'000;
  std::atomic<uint64_t> come{0};
  std::atomic<uint64_t> taken{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int turn = 0; taken < kSignals; ++turn) {
        SignalQueue::Place place(queue);
        if (turn % 3 != 0 && place.take(come)) ++taken;
      }
    });
  }
  while (come < kSignals) {
    ++come;
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(taken, kSignals);
}

}  // namespace
}  // namespace zeropg

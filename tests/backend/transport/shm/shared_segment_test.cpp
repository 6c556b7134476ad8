#include "backend/transport/shm/shared_segment.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "backend/platform/process/descriptor.h"
#include "tests/backend/child_process.h"

namespace zeropg {
namespace {

using std::chrono::milliseconds;

std::vector<std::unique_ptr<SharedSegment>> make_ranks(int32_t world_size, int64_t bytes_per_rank,
                                                       std::function<void(int32_t)> check = {}) {
  const Descriptor fd(SharedSegment::create(world_size, bytes_per_rank));
  std::vector<std::unique_ptr<SharedSegment>> ranks;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::make_unique<SharedSegment>(::dup(fd.get()), rank, world_size, bytes_per_rank, check));
  }
  return ranks;
}

TEST(SharedSegment, PartsAreContiguousAndShared) {
  for (const int64_t bytes : {0, 1, 100, 4096, 10000}) {
    auto ranks = make_ranks(3, bytes);
    for (int32_t rank = 0; rank < 3; ++rank) std::memset(ranks[rank]->data() + rank * bytes, 'a' + rank, bytes);
    const std::string expected = std::string(bytes, 'a') + std::string(bytes, 'b') + std::string(bytes, 'c');
    for (const auto& rank : ranks) {
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(rank->data()), 3 * bytes), expected);
      for (int counter = 0; counter < SharedSegment::kCounters; ++counter) EXPECT_EQ(rank->read(2, counter), 0U);
    }
  }
}

TEST(SharedSegment, RefusesImpossibleSizesAndForeignDescriptors) {
  EXPECT_THROW(SharedSegment::create(0, 1), c10::ValueError);
  EXPECT_THROW(SharedSegment::create(2, -1), c10::ValueError);
  EXPECT_THROW(SharedSegment::create(2, int64_t{1} << 60), c10::ValueError);
  EXPECT_THROW(SharedSegment::create(2, int64_t{1} << 58), c10::DistBackendError);
  EXPECT_THROW(SharedSegment(SharedSegment::create(2, 4096), 0, 2, 8192, {}), c10::DistBackendError);
}

TEST(SharedSegment, WaitReturnsWhenTheCounterIsReached) {
  auto ranks = make_ranks(2, 64);
  std::thread publisher([&] {
    for (uint64_t value = 1; value <= 1000; ++value) {
      std::memcpy(ranks[1]->data() + 64, &value, sizeof value);
      ranks[1]->publish(3, value);
      ranks[1]->wait(0, 3, value, milliseconds(20000), "test");
    }
  });
  for (uint64_t value = 1; value <= 1000; ++value) {
    ranks[0]->wait(1, 3, value, milliseconds(20000), "test");
    uint64_t seen = 0;
    std::memcpy(&seen, ranks[0]->data() + 64, sizeof seen);
    EXPECT_EQ(seen, value);
    ranks[0]->publish(3, value);
  }
  publisher.join();
}

TEST(SharedSegment, SleepersAreWokenAcrossProcesses) {
  const Descriptor fd(SharedSegment::create(2, 4096));
  ChildProcess child([&] {
    SharedSegment own(::dup(fd.get()), 1, 2, 4096, {});
    for (uint64_t value = 1; value <= 50; ++value) {
      own.wait(0, 0, value, milliseconds(20000), "test");
      std::this_thread::sleep_for(milliseconds(value % 10 == 0 ? 3 : 0));  // long enough for the peer to fall asleep
      own.publish(0, value);
    }
    return true;
  });
  SharedSegment own(::dup(fd.get()), 0, 2, 4096, {});
  for (uint64_t value = 1; value <= 50; ++value) {
    own.publish(0, value);
    own.wait_all(0, value, milliseconds(20000), "test");
  }
  EXPECT_TRUE(child.succeeded());
}

TEST(SharedSegment, DeadlineNamesTheLateRanks) {
  auto ranks = make_ranks(4, 64);
  ranks[0]->publish(2, 5);
  ranks[2]->publish(2, 7);
  try {
    ranks[0]->wait_all(2, 5, milliseconds(20), "gather of layer 3");
    FAIL();
  } catch (const c10::DistBackendError& error) {
    EXPECT_EQ(
        std::string(error.what_without_backtrace())
            .rfind("[zeropg rank 0/4] gather of layer 3: ranks 1, 3 late after 20 ms (count 0, 0, expected 5)", 0),
        0U)
        << error.what_without_backtrace();
  }
  EXPECT_THROW(ranks[0]->wait(1, 2, 1, milliseconds(0), "x"), c10::DistBackendError);
  ranks[0]->wait(2, 2, 7, milliseconds(0), "x");  // reached already: no deadline applies
}

TEST(SharedSegment, CheckEndsAWait) {
  std::atomic<bool> is_aborted{false};
  auto ranks = make_ranks(2, 64, [&](int32_t) {
    if (is_aborted) C10_THROW_ERROR(DistBackendError, "aborted");
  });
  std::thread aborter([&] {
    std::this_thread::sleep_for(milliseconds(5));
    is_aborted = true;
  });
  EXPECT_THROW(ranks[0]->wait_all(0, 1, milliseconds(20000), "test"), c10::DistBackendError);
  aborter.join();
}

}  // namespace
}  // namespace zeropg

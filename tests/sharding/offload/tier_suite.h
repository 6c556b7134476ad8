// The contract of Tier, once. An implementation instantiates it with a function that makes one:
//
//   INSTANTIATE_TEST_SUITE_P(Host, TierSuite, ::testing::Values([] { return make_host_tier(false); }));
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "sharding/offload/aligned_buffer.h"
#include "sharding/offload/tier.h"

namespace zeropg {

using MakeTier = std::function<std::unique_ptr<Tier>()>;

inline AlignedBuffer pattern(uint64_t bytes, uint64_t seed) {
  AlignedBuffer buffer(bytes);
  std::mt19937_64 random(seed);
  for (uint64_t at = 0; at + 8 <= buffer.bytes(); at += 8) {
    const uint64_t word = random();
    std::memcpy(buffer.data() + at, &word, 8);
  }
  return buffer;
}

class TierSuite : public ::testing::TestWithParam<MakeTier> {
 protected:
  void SetUp() override { tier_ = GetParam()(); }

  // A multiple of every tier's alignment.
  static constexpr uint64_t kUnit = kPageBytes;

  static bool same(const AlignedBuffer& a, const AlignedBuffer& b, uint64_t bytes) {
    return std::memcmp(a.data(), b.data(), bytes) == 0;
  }

  std::unique_ptr<Tier> tier_;
};

TEST_P(TierSuite, what_is_allocated_reads_as_zeros) {
  const TierExtent extent = tier_->allocate(5 * kUnit, "a test");
  AlignedBuffer read = pattern(5 * kUnit, 1);
  tier_->read(extent, 0, read.part(0, 5 * kUnit)).wait();
  EXPECT_TRUE(same(read, AlignedBuffer(5 * kUnit), 5 * kUnit));
}

TEST_P(TierSuite, sizes_are_rounded_up_to_the_alignment) {
  EXPECT_EQ(tier_->alignment() & (tier_->alignment() - 1), 0U);
  uint64_t total = 0;
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{63}, uint64_t{4095}, uint64_t{4097}, uint64_t{1000003}}) {
    const TierExtent extent = tier_->allocate(bytes, "a test");
    EXPECT_GE(extent.bytes, bytes);
    EXPECT_EQ(extent.bytes % tier_->alignment(), 0U);
    EXPECT_LT(extent.bytes - bytes, tier_->alignment());
    total += extent.bytes;
  }
  EXPECT_EQ(tier_->reserved_bytes(), total);
}

TEST_P(TierSuite, nothing_may_be_allocated) {
  const TierExtent extent = tier_->allocate(0, "nothing");
  EXPECT_EQ(extent.bytes, 0U);
  tier_->read(extent, 0, {}).wait();
  tier_->free(extent);
}

TEST_P(TierSuite, random_ranges_of_many_extents_keep_their_bytes) {
  std::mt19937 random(7);
  std::vector<TierExtent> extents;
  std::vector<AlignedBuffer> expected;
  for (int i = 0; i < 24; ++i) {
    const uint64_t bytes = (random() % 40 + 1) * kUnit;
    extents.push_back(tier_->allocate(bytes, "a test"));
    expected.emplace_back(bytes);
  }
  for (int round = 0; round < 400; ++round) {
    const size_t which = random() % extents.size();
    const uint64_t units = extents[which].bytes / kUnit;
    const uint64_t first = random() % units;
    const uint64_t bytes = (random() % (units - first) + 1) * kUnit;
    if (random() % 2 == 0) {
      const AlignedBuffer written = pattern(bytes, random());
      tier_->write(extents[which], first * kUnit, written.part(0, bytes)).wait();
      std::memcpy(expected[which].data() + first * kUnit, written.data(), bytes);
    } else {
      AlignedBuffer read(bytes);
      tier_->read(extents[which], first * kUnit, read.part(0, bytes)).wait();
      ASSERT_EQ(std::memcmp(read.data(), expected[which].data() + first * kUnit, bytes), 0) << "round " << round;
    }
  }
}

TEST_P(TierSuite, many_transfers_run_at_once) {
  constexpr uint64_t kCount = 200;
  const TierExtent extent = tier_->allocate(kCount * 2 * kUnit, "a test");
  const AlignedBuffer written = pattern(kCount * 2 * kUnit, 3);
  AlignedBuffer read(kCount * 2 * kUnit);
  {
    std::vector<Transfer> transfers;
    for (uint64_t i = 0; i < kCount; ++i) {
      transfers.push_back(tier_->write(extent, i * 2 * kUnit, written.part(i * 2 * kUnit, 2 * kUnit)));
    }
    for (Transfer& transfer : transfers) transfer.wait();
    for (uint64_t i = kCount; i-- > 0;) {
      transfers[i] = tier_->read(extent, i * 2 * kUnit, read.part(i * 2 * kUnit, 2 * kUnit));
    }
  }  // dropping transfers waits for them
  EXPECT_TRUE(same(read, written, kCount * 2 * kUnit));
}

TEST_P(TierSuite, overlapping_transfers_run_in_the_order_of_the_calls) {
  constexpr uint64_t kBytes = 64 * kUnit;
  const TierExtent extent = tier_->allocate(kBytes, "a test");
  std::vector<AlignedBuffer> written;
  std::vector<AlignedBuffer> read;
  std::vector<Transfer> transfers;
  for (uint64_t i = 0; i < 20; ++i) {
    written.push_back(pattern(kBytes, 100 + i));
    read.emplace_back(kBytes);
  }
  for (uint64_t i = 0; i < 20; ++i) {  // a whole write, half of it over again, a read of all
    transfers.push_back(tier_->write(extent, 0, written[i].part(0, kBytes)));
    transfers.push_back(tier_->write(extent, kBytes / 2, written[(i + 1) % 20].part(0, kBytes / 2)));
    transfers.push_back(tier_->read(extent, 0, read[i].part(0, kBytes)));
  }
  for (Transfer& transfer : transfers) transfer.wait();
  for (uint64_t i = 0; i < 20; ++i) {
    EXPECT_TRUE(same(read[i], written[i], kBytes / 2)) << i;
    EXPECT_EQ(std::memcmp(read[i].data() + kBytes / 2, written[(i + 1) % 20].data(), kBytes / 2), 0) << i;
  }
}

TEST_P(TierSuite, threads_may_use_it_at_the_same_time) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t round = 0; round < 20; ++round) {
        const uint64_t bytes = (round % 5 + 1) * kUnit;
        const TierExtent extent = tier_->allocate(bytes, "a test");
        const AlignedBuffer written = pattern(bytes, id * 1000 + round);
        AlignedBuffer read(bytes);
        tier_->write(extent, 0, written.part(0, bytes)).wait();
        tier_->read(extent, 0, read.part(0, bytes)).wait();
        wrong += same(read, written, bytes) ? 0 : 1;
        tier_->free(extent);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(tier_->reserved_bytes(), 0U);
}

TEST_P(TierSuite, freed_space_is_used_again_and_reads_as_zeros) {
  const TierExtent before = tier_->allocate(8 * kUnit, "a neighbour");
  for (uint64_t round = 0; round < 50; ++round) {
    const TierExtent extent = tier_->allocate((round % 7 + 1) * kUnit, "a test");
    AlignedBuffer read = pattern(extent.bytes, 5);
    tier_->read(extent, 0, read.part(0, extent.bytes)).wait();
    EXPECT_TRUE(same(read, AlignedBuffer(extent.bytes), extent.bytes)) << round;
    const AlignedBuffer written = pattern(extent.bytes, round);
    tier_->write(extent, 0, written.part(0, extent.bytes)).wait();
    tier_->free(extent);
  }
  EXPECT_EQ(tier_->reserved_bytes(), before.bytes);
}

TEST_P(TierSuite, a_range_outside_of_the_extent_is_refused) {
  const TierExtent extent = tier_->allocate(2 * kUnit, "a test");
  AlignedBuffer buffer(4 * kUnit);
  EXPECT_THROW(tier_->read(extent, kUnit, buffer.part(0, 2 * kUnit)), c10::ValueError);
  EXPECT_THROW(tier_->write(extent, 3 * kUnit, buffer.part(0, kUnit)), c10::ValueError);
  EXPECT_THROW(tier_->write(extent, ~uint64_t{0} - kUnit + 1, buffer.part(0, 2 * kUnit)), c10::ValueError);
}

TEST_P(TierSuite, what_is_not_aligned_is_refused) {
  const TierExtent extent = tier_->allocate(4 * kUnit, "a test");
  AlignedBuffer buffer(4 * kUnit);
  EXPECT_THROW(tier_->read(extent, 8, buffer.part(0, kUnit)), c10::ValueError);
  EXPECT_THROW(tier_->read(extent, 0, buffer.part(8, kUnit)), c10::ValueError);
  EXPECT_THROW(tier_->write(extent, 0, buffer.part(0, kUnit - 8)), c10::ValueError);
}

TEST_P(TierSuite, more_than_there_is_is_an_error_that_says_what_for) {
  const uint64_t before = tier_->reserved_bytes();
  try {
    tier_->allocate(uint64_t{1} << 60, "the masters of a test");
    FAIL() << "allocated an exbibyte";
  } catch (const TierError& error) {
    EXPECT_NE(std::string(error.what()).find("the masters of a test"), std::string::npos) << error.what();
    EXPECT_NE(error.code(), 0);
  }
  EXPECT_EQ(tier_->reserved_bytes(), before);
  const TierExtent extent = tier_->allocate(kUnit, "a test");  // and it still works
  AlignedBuffer buffer(kUnit);
  tier_->write(extent, 0, buffer.part(0, kUnit)).wait();
}

TEST_P(TierSuite, bytes_in_place_are_those_that_transfers_move) {
  const TierExtent extent = tier_->allocate(2 * kUnit, "a test");
  std::byte* const address = tier_->address(extent);
  if (address == nullptr) return;  // it has no addresses
  const AlignedBuffer written = pattern(kUnit, 9);
  tier_->write(extent, kUnit, written.part(0, kUnit)).wait();
  EXPECT_EQ(std::memcmp(address + kUnit, written.data(), kUnit), 0);
}

}  // namespace zeropg

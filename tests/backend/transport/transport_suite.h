// The contract of Transport, once. An implementation instantiates it with a function that makes connected ranks:
//
//   INSTANTIATE_TEST_SUITE_P(Shm, TransportSuite, ::testing::Values(make_shm_world));
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "backend/transport/transport.h"

namespace zeropg {

// The ranks of one group, all in this process.
class TransportWorld {
 public:
  virtual ~TransportWorld() = default;
  virtual Transport& rank(int32_t rank) = 0;
  virtual void depart(int32_t rank) = 0;  // leaves the group on purpose
};

using MakeTransportWorld = std::unique_ptr<TransportWorld> (*)(int32_t world_size);

constexpr Lane kLanes[] = {Lane::kCollective, Lane::kPointToPoint};

// The n-th byte of a stream, different for every stream, so that a byte in the wrong place or stream shows.
inline std::byte stream_byte(int32_t from, int32_t to, Lane lane, size_t n) {
  const size_t seed = (from * 31 + to) * 2 + static_cast<size_t>(lane);
  return static_cast<std::byte>((n * 2654435761U + seed * 97 + (n >> 13)) >> 5);
}

class TransportSuite : public ::testing::TestWithParam<MakeTransportWorld> {
 protected:
  std::unique_ptr<TransportWorld> make(int32_t world_size) { return GetParam()(world_size); }

  // Moves `total` bytes in pieces of random sizes; both run to the end in a thread of their own.
  static bool send_stream(Transport& transport, int32_t from, int32_t to, Lane lane, size_t total) {
    std::mt19937 random(static_cast<unsigned>(from * 7 + to));
    std::vector<std::byte> piece;
    for (size_t sent = 0; sent < total;) {
      piece.resize(std::min<size_t>(total - sent, random() % 5000 + 1));
      for (size_t i = 0; i < piece.size(); ++i) piece[i] = stream_byte(from, to, lane, sent + i);
      for (size_t done = 0; done < piece.size();) {
        const size_t moved = transport.try_send(to, lane, std::span<const std::byte>(piece).subspan(done));
        if (moved == 0) std::this_thread::yield();
        done += moved;
      }
      sent += piece.size();
    }
    return true;
  }

  static bool receive_stream(Transport& transport, int32_t from, int32_t to, Lane lane, size_t total) {
    std::mt19937 random(static_cast<unsigned>(from * 13 + to));
    std::vector<std::byte> piece;
    for (size_t received = 0; received < total;) {
      piece.resize(random() % 7000 + 1);
      const size_t moved = transport.try_receive(from, lane, piece);
      if (moved == 0) std::this_thread::yield();
      for (size_t i = 0; i < moved; ++i) {
        if (piece[i] != stream_byte(from, to, lane, received + i)) return false;
      }
      received += moved;
    }
    return true;
  }
};

TEST_P(TransportSuite, ReachesPeersButNotItselfNorStrangers) {
  auto world = make(3);
  EXPECT_FALSE(world->rank(1).name().empty());
  EXPECT_TRUE(world->rank(1).can_reach(0));
  EXPECT_TRUE(world->rank(1).can_reach(2));
  for (const int32_t nobody : {-1, 1, 3, 1 << 30}) EXPECT_FALSE(world->rank(1).can_reach(nobody));
}

TEST_P(TransportSuite, ReturnsAtOnceWhenThePeerIsNotReady) {
  auto world = make(2);
  std::vector<std::byte> data(1 << 16);
  EXPECT_EQ(world->rank(0).try_receive(1, Lane::kCollective, data), 0U);
  EXPECT_EQ(world->rank(0).try_send(1, Lane::kCollective, {}), 0U);
  size_t taken = 0;
  for (size_t moved = 1; moved > 0 && taken < (size_t{1} << 30); taken += moved) {
    moved = world->rank(0).try_send(1, Lane::kCollective, data);
  }
  EXPECT_GT(taken, 0U);
  EXPECT_LT(taken, size_t{1} << 30) << "a transport that takes everything has no back-pressure";
}

TEST_P(TransportSuite, BytesArriveInOrderInPiecesOfAnySize) {
  auto world = make(2);
  for (const size_t total : {1, 63, 64, 65, 1000}) {
    std::vector<std::byte> out(total);
    std::vector<std::byte> in(total);
    for (size_t i = 0; i < total; ++i) out[i] = stream_byte(0, 1, Lane::kCollective, i);
    for (size_t sent = 0, received = 0; received < total;) {
      sent += world->rank(0).try_send(1, Lane::kCollective, std::span<const std::byte>(out).subspan(sent));
      const size_t limit = std::min<size_t>(total - received, 17);
      received += world->rank(1).try_receive(0, Lane::kCollective, std::span(in).subspan(received, limit));
    }
    EXPECT_EQ(in, out);
  }
}

TEST_P(TransportSuite, LanesPairsAndDirectionsAreIndependent) {
  auto world = make(3);
  std::vector<std::byte> flood(1 << 16);
  while (world->rank(0).try_send(1, Lane::kCollective, flood) > 0) {
  }
  const auto pass = [&](int32_t from, int32_t to, Lane lane) {
    const std::byte sent{42};
    std::byte received{0};
    EXPECT_EQ(world->rank(from).try_send(to, lane, {&sent, 1}), 1U);
    // Behind the flood a network may need several looks; that the flood stays where it is shows the independence.
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    size_t bytes = 0;
    while (bytes == 0 && std::chrono::steady_clock::now() < limit) {
      bytes = world->rank(to).try_receive(from, lane, {&received, 1});
    }
    EXPECT_EQ(bytes, 1U);
    EXPECT_EQ(received, sent);
  };
  pass(0, 1, Lane::kPointToPoint);
  pass(1, 0, Lane::kCollective);
  pass(0, 2, Lane::kCollective);
  pass(2, 1, Lane::kCollective);
}

TEST_P(TransportSuite, StreamsKeepTheirBytesUnderStress) {
  for (const int32_t world_size : {2, 3}) {
    auto world = make(world_size);
    constexpr size_t kTotal = 300'000;
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int32_t from = 0; from < world_size; ++from) {
      for (int32_t to = 0; to < world_size; ++to) {
        if (from == to) continue;
        for (const Lane lane : kLanes) {
          threads.emplace_back([&, from, to, lane] { send_stream(world->rank(from), from, to, lane, kTotal); });
          threads.emplace_back([&, from, to, lane] {
            if (!receive_stream(world->rank(to), from, to, lane, kTotal)) ++wrong;
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
  }
}

TEST_P(TransportSuite, LastWordsAreHeardThenThePeerIsGone) {
  auto world = make(2);
  const std::byte last{7};
  ASSERT_EQ(world->rank(1).try_send(0, Lane::kPointToPoint, {&last, 1}), 1U);
  world->depart(1);
  std::byte heard{0};
  EXPECT_EQ(world->rank(0).try_receive(1, Lane::kPointToPoint, {&heard, 1}), 1U);
  EXPECT_EQ(heard, last);
  EXPECT_THROW(world->rank(0).try_receive(1, Lane::kPointToPoint, {&heard, 1}), c10::DistNetworkError);
  EXPECT_THROW(world->rank(0).try_send(1, Lane::kPointToPoint, {&last, 1}), c10::DistNetworkError);
}

TEST_P(TransportSuite, ErrorsNamePeerAndTransport) {
  auto world = make(2);
  world->depart(1);
  const std::byte data{};
  try {
    world->rank(0).try_send(1, Lane::kCollective, {&data, 1});
    FAIL();
  } catch (const c10::DistNetworkError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
    EXPECT_NE(text.find(world->rank(0).name()), std::string::npos) << text;
  }
}

}  // namespace zeropg

#include "backend/transport/network/byte_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace zeropg {
namespace {

Payload payload_of(const std::string& text) {
  Payload payload{std::make_unique<std::byte[]>(text.size()), text.size()};
  std::memcpy(payload.data.get(), text.data(), text.size());
  return payload;
}

TEST(ByteStream, TakesBytesInOrderAcrossPayloads) {
  IncomingStream stream;
  for (const char* text : {"ab", "", "cdefg", "h"}) stream.put(payload_of(text));
  EXPECT_EQ(stream.queued_bytes(), 8U);
  std::string all;
  for (const size_t want : {3, 0, 1, 9}) {
    std::string part(want, '.');
    part.resize(stream.take(std::as_writable_bytes(std::span(part.data(), part.size()))));
    all += part;
  }
  EXPECT_EQ(all, "abcdefgh");
  EXPECT_EQ(stream.queued_bytes(), 0U);
}

TEST(ByteStream, WindowsOfAllPeersShareABudget) {
  constexpr int64_t kUsual = 4 << 20;
  EXPECT_EQ(shared_window_bytes(kUsual, 2), kUsual);
  EXPECT_EQ(shared_window_bytes(kUsual, 42), kUsual);
  EXPECT_EQ(shared_window_bytes(4096, 100'000), 4096) << "what the user asks for is the most";
  int64_t last = kUsual;
  for (const int32_t ranks : {43, 64, 128, 1024, 2700}) {
    const int64_t window = shared_window_bytes(kUsual, ranks);
    EXPECT_LT(window, last) << ranks;
    EXPECT_LE(2 * ranks * static_cast<int64_t>(stream_limit_bytes(window) - stream_limit_bytes(0)), 512 << 20);
    last = window;
  }
  EXPECT_EQ(shared_window_bytes(kUsual, 10'000), 64 << 10);
}

TEST(ByteStream, TellsWhatWasTakenAfterHalfAWindowAndThenOnce) {
  IncomingStream stream;
  stream.put(payload_of(std::string(100, 'x')));
  std::vector<std::byte> data(49);
  stream.take(data);
  EXPECT_EQ(stream.credit_to_tell(100), std::nullopt);
  stream.take(std::span(data).first(1));
  EXPECT_EQ(stream.credit_to_tell(100), 50U);
  EXPECT_EQ(stream.credit_to_tell(100), std::nullopt);
}

TEST(ByteStream, ACreditIsNeitherAheadOfTheSenderNorBehindTheOneBefore) {
  OutgoingStream stream;
  stream.note_sent(100);
  EXPECT_TRUE(stream.take_credit(40));
  EXPECT_EQ(stream.in_flight_bytes(), 60U);
  for (const uint64_t lie : {uint64_t{39}, uint64_t{101}, ~uint64_t{0}, uint64_t{0}}) {
    EXPECT_FALSE(stream.take_credit(lie)) << lie;
    EXPECT_EQ(stream.in_flight_bytes(), 60U);
  }
  EXPECT_TRUE(stream.take_credit(100));
}

}  // namespace
}  // namespace zeropg

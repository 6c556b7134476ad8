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

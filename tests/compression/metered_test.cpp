#include "compression/metered.h"

#include <gtest/gtest.h>

#include <vector>

#include "compression/registry/registry.h"

namespace zeropg {
namespace {

std::vector<float> ramp(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) - static_cast<float>(count) / 3;
  return values;
}

TEST(Metered, CountsBytesAndTimeAndLeavesTheEncodingAlone) {
  const auto plain = make_compressor("block_quant", {{"bits", 4}});
  const auto counted = metered(plain);
  const std::vector<float> values = ramp(1000);
  std::vector<std::byte> expected(static_cast<size_t>(plain->capacity_bytes(1000))), encoded(expected.size());
  ASSERT_EQ(counted->description(), plain->description());
  ASSERT_EQ(counted->encode(values, {}, encoded), plain->encode(values, {}, expected));
  EXPECT_EQ(encoded, expected);
  std::vector<float> decoded(1000);
  counted->decode_add(encoded, decoded);

  const CodecCounters counters = counted->counters();
  EXPECT_EQ(counters.encodings, 1);
  EXPECT_EQ(counters.plain_bytes, 4000);
  EXPECT_EQ(counters.encoded_bytes, static_cast<int64_t>(encoded.size()));
  EXPECT_GT(counters.encode_seconds, 0);
  EXPECT_GT(counters.decode_seconds, 0);
}

TEST(Metered, CountsResultsThatTravelInAnotherCodecToo) {
  const auto plain = make_compressor("top_k", {{"ratio", 0.01}});
  const auto counted = metered(plain);
  ASSERT_NE(&plain->for_results(), plain.get());
  const Compressor& results = counted->for_results();
  ASSERT_EQ(results.description(), plain->for_results().description());
  const std::vector<float> values = ramp(1000);
  std::vector<std::byte> encoded(static_cast<size_t>(results.capacity_bytes(1000)));
  const int64_t length = results.encode(values, {}, encoded);
  EXPECT_EQ(counted->counters().encodings, 1);
  EXPECT_EQ(counted->counters().encoded_bytes, length);
}

TEST(Metered, SelectsAsTheCodecDoes) {
  const auto plain = make_compressor("top_k", {{"ratio", 0.05}});
  const auto counted = metered(plain);
  ASSERT_TRUE(counted->selects());
  const std::vector<float> values = ramp(1000);
  std::vector<float> owed(1000), owed_too(1000);
  const std::vector<SelectionRange> range = {{values, owed}};
  const Selection expected = plain->select(range);
  const Selection selection = counted->select(std::vector<SelectionRange>{{values, owed_too}});
  EXPECT_EQ(selection.threshold_bits, expected.threshold_bits);
  std::vector<std::byte> bytes(static_cast<size_t>(plain->capacity_bytes(1000))), same(bytes.size());
  ASSERT_EQ(counted->encode_selected(selection, values, owed_too, same),
            plain->encode_selected(expected, values, owed, bytes));
  EXPECT_EQ(same, bytes);
  EXPECT_EQ(owed_too, owed);
}

}  // namespace
}  // namespace zeropg

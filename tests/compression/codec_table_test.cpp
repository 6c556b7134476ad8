#include "compression/codec_table.h"

#include <gtest/gtest.h>

#include "compression/codec_meter.h"
#include "compression/registry/registry.h"

namespace zeropg {
namespace {

TEST(CodecTable, GivesTheLastRowThatBeginsNoLater) {
  const auto int4 = make_compressor("block_quant", {{"bits", 4}});
  const CodecTable table({{.from_numel = 0}, {.from_numel = 1000, .codec = int4, .has_error_feedback = true}});
  EXPECT_EQ(table.of(999).codec, nullptr);
  EXPECT_EQ(table.of(1000).codec, int4);
  EXPECT_TRUE(table.of(1 << 30).has_error_feedback);
  EXPECT_EQ(CodecTable().of(1000).codec, nullptr);
  EXPECT_TRUE(CodecTable().is_empty());
  EXPECT_FALSE(table.is_empty());
}

TEST(CodecMeter, AddsUpWhatCallsCount) {
  CodecMeter meter;
  const CodecCounters call{.calls = 1,
                           .plain_bytes = 400,
                           .encoded_bytes = 100,
                           .encode_seconds = 0.5,
                           .decode_seconds = 0.25,
                           .wire_seconds = 2};
  meter.add(call);
  meter.add(call);
  const CodecCounters sums = meter.counters();
  EXPECT_EQ(sums.calls, 2);
  EXPECT_EQ(sums.plain_bytes, 800);
  EXPECT_EQ(sums.encoded_bytes, 200);
  EXPECT_EQ(sums.encode_seconds, 1);
  EXPECT_EQ(sums.decode_seconds, 0.5);
  EXPECT_EQ(sums.wire_seconds, 4);
}

}  // namespace
}  // namespace zeropg

#include "compression/selective/random_k.h"

#include "tests/compression/compressor_suite.h"

namespace zeropg {
namespace {

// It contracts as a rule, not always: an outlier is sent in one of 100 cases. What has been decoded has another hash,
// so other places are sent of it.
const std::vector<CompressorCase> kCases = {
    {"RandomK", "random_k", {}, 0.0413, nullptr, 1.0, true, false},
    {"RandomKThird", "random_k", {{"ratio", 0.3}}, 1.38, nullptr, 1.0, true, false},
    {"RandomKEverything", "random_k", {{"ratio", 1}}, 4.126},
};
INSTANTIATE_TEST_SUITE_P(RandomK, CompressorSuite, testing::ValuesIn(kCases), case_name);

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

struct Sent {
  Bytes encoded;
  Floats decoded;
};

Sent send(const Compressor& codec, const Floats& values, Floats& residual) {
  Sent sent{Bytes(codec.capacity_bytes(static_cast<int64_t>(values.size()))), Floats(values.size())};
  codec.encode(values, residual, sent.encoded);
  codec.decode(sent.encoded, sent.decoded);
  return sent;
}

TEST(RandomKTest, SendsOneValueOfEachStrideAndInTimeEachOfThem) {
  const RandomK codec(0.1);
  std::mt19937 random(1);
  Floats values(1005), residual(values.size(), 0.0f);
  std::vector<int> times(values.size(), 0);
  for (int step = 0; step < 300; ++step) {
    for (float& value : values) value = static_cast<float>(random() % 1000 + 1);
    const Sent sent = send(codec, values, residual);
    for (size_t start = 0; start < values.size(); start += 10) {
      int in_stride = 0;
      for (size_t i = start; i < std::min(start + 10, values.size()); ++i) {
        in_stride += sent.decoded[i] != 0.0f;
        times[i] += sent.decoded[i] != 0.0f;
      }
      ASSERT_EQ(in_stride, 1) << "stride at " << start;
    }
  }
  for (size_t i = 0; i < 1000; ++i) EXPECT_NEAR(times[i], 30, 29) << i;
}

// The seed is a hash of what is encoded, so it must not stay where everything that it hits has been sent.
TEST(RandomKTest, SendsWhatIsLeftWithoutNewGradients) {
  const RandomK codec(0.01);
  Floats residual(3200, 0.0f);
  for (size_t i = 0; i < residual.size(); i += 401) residual[i] = 1.0f;
  const Floats zeros(residual.size(), 0.0f);
  Floats sum(residual.size(), 0.0f);
  const Floats wanted = residual;
  for (int step = 0; step < 8; ++step) {
    const Sent sent = send(codec, zeros, residual);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += sent.decoded[i];
  }
  EXPECT_TRUE(sum == wanted);
  EXPECT_TRUE(residual == zeros);
}

TEST(RandomKTest, HasTheFormatThatTheReadmeGives) {
  const RandomK codec(0.5);
  EXPECT_EQ(codec.block_elements(), 64);
  EXPECT_EQ(codec.capacity_bytes(64), 4 + 4 * 32);
  EXPECT_EQ(codec.capacity_bytes(64 + 3), 2 * 4 + 4 * 34);
  // Strides of 2 and 1, and the hash of 0 is 0.
  Bytes encoded(4 + 4 * 2);
  const uint32_t seed = 3;
  const float numbers[] = {5.0f, -1.0f};
  std::memcpy(encoded.data(), &seed, 4);
  std::memcpy(encoded.data() + 4, numbers, 8);
  Floats decoded(3);
  codec.decode(encoded, decoded);
  EXPECT_EQ(decoded, (Floats{0.0f, 5.0f, -1.0f}));
}

TEST(RandomKTest, RefusesBadParameters) {
  const auto message = [](double ratio) -> std::string {
    try {
      make_compressor("random_k", {{"ratio", ratio}});
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(message(0), "random_k: ratio is 0, expected 5e-05 to 1");
  EXPECT_EQ(message(1.01), "random_k: ratio is 1.01, expected 5e-05 to 1");
  EXPECT_NE(message(std::numeric_limits<double>::quiet_NaN()).find("expected 5e-05 to 1"), std::string::npos);
  EXPECT_EQ(make_compressor("random_k", {})->description(), "random_k(ratio=0.01)");
}

}  // namespace
}  // namespace zeropg

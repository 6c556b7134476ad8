#include "compression/selective/top_k.h"

#include <algorithm>
#include <numeric>

#include "compression/selective/top_k_selection.h"
#include "tests/compression/compressor_suite.h"

namespace zeropg {
namespace {

// Values of 8 bits that became zero have no entry the second time, and others then share a scale.
const std::vector<CompressorCase> kCases = {
    {"TopK", "top_k", {}, 0.06},
    {"TopK10PercentBf16", "top_k", {{"ratio", 0.1}, {"value_bits", 16}}, 0.3},
    {"TopKInt8", "top_k", {{"value_bits", 8}}, 0.025, nullptr, 0.999, true, false},
    {"TopKSampled", "top_k", {{"exact", 0}}, 0.06},
    {"TopKEverything", "top_k", {{"ratio", 1}}, 4.1},
};
INSTANTIATE_TEST_SUITE_P(TopK, CompressorSuite, testing::ValuesIn(kCases), case_name);

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

uint32_t magnitude(float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffff; }

// `kinds`: how many different magnitudes; 0 for all different.
Floats random_floats(size_t count, uint32_t seed, int kinds = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) {
    value = kinds == 0 ? normal(random) : static_cast<float>(static_cast<int>(random() % (2 * kinds + 1)) - kinds);
  }
  return values;
}

// What a sort selects: by magnitude, then by place; never zeros. Rising.
std::vector<int64_t> selected(const Floats& values, int64_t wanted) {
  std::vector<int64_t> places(values.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return magnitude(values[a]) > magnitude(values[b]); });
  places.resize(static_cast<size_t>(wanted));
  while (!places.empty() && values[places.back()] == 0.0f) places.pop_back();
  std::sort(places.begin(), places.end());
  return places;
}

int64_t wanted_of(double ratio, size_t count) {
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(count)));
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

bool all_nan(const Floats& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

Floats decode(const Compressor& codec, const Bytes& encoded, size_t count) {
  Floats values(count, 42.0f);
  codec.decode(encoded, values);
  return values;
}

// Ranges as a contribution has them: parts of one row of values, each with a residual or without.
struct Contribution {
  std::vector<Floats> values;
  std::vector<Floats> residuals;  // empty for none

  Contribution(const Floats& all, const std::vector<size_t>& sizes, uint32_t seed) {
    size_t start = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      values.emplace_back(all.begin() + start, all.begin() + start + sizes[i]);
      residuals.push_back(i % 3 == 1 ? Floats() : random_floats(sizes[i], seed + i, 3));
      start += sizes[i];
    }
  }

  std::vector<SelectionRange> ranges() {
    std::vector<SelectionRange> result;
    for (size_t i = 0; i < values.size(); ++i) result.push_back({values[i], residuals[i]});
    return result;
  }

  Floats sums() const {
    Floats result;
    for (size_t i = 0; i < values.size(); ++i) {
      for (size_t j = 0; j < values[i].size(); ++j) {
        result.push_back(residuals[i].empty() ? values[i][j] : values[i][j] + residuals[i][j]);
      }
    }
    return result;
  }

  // Of the selection that select() has made, range by range.
  std::vector<int64_t> places(const Selection& selection) const {
    std::vector<int64_t> result;
    int64_t start = 0;
    for (const Floats& part : values) {
      const auto size = static_cast<int64_t>(part.size());
      for (const uint32_t place : selected_places(selection.at(start), size)) result.push_back(start + place);
      start += size;
    }
    return result;
  }
};

TEST(TopKTest, SelectsAsASortDoesOnEveryInstructionSet) {
  const std::vector<std::vector<size_t>> splits = {
      {1}, {0, 7}, {17, 5000, 33, 0, 901, 4096}, {9000, 16, 12001, 8192}, {70000}};
  for (const TopKSet& set : usable_top_k_sets()) {
    for (const double ratio : {0.0003, 0.01, 0.1, 0.7, 1.0}) {
      for (const int kinds : {0, 1, 3, 40}) {
        for (const std::vector<size_t>& sizes : splits) {
          const size_t count = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
          SCOPED_TRACE(std::string(set.name) + " ratio " + std::to_string(ratio) + " kinds " + std::to_string(kinds) +
                       " of " + std::to_string(count));
          const Floats all = random_floats(count, static_cast<uint32_t>(count), kinds);
          Contribution contribution(all, sizes, 7);
          const Floats sums = contribution.sums();
          const Selection selection = TopK(ratio, 32, true, set).select(contribution.ranges());
          ASSERT_TRUE(selection.is_finite);
          for (size_t i = 0, start = 0; i < sizes.size(); start += sizes[i++]) {
            const Floats& residual = contribution.residuals[i];
            if (residual.empty()) continue;
            EXPECT_TRUE(same_bits(residual, {&sums[start], &sums[start] + sizes[i]}));
          }
          EXPECT_EQ(contribution.places(selection), selected(sums, wanted_of(ratio, count)));
        }
      }
    }
  }
}

// Every sampled value is large, hardly any other one: more are wanted than the sample promises.
TEST(TopKTest, SelectsExactlyWhereTheSampleMisleads) {
  const size_t count = 1 << 16;
  for (const bool are_sampled_large : {true, false}) {
    Floats values = random_floats(count, 3);
    for (int64_t i = 0; i < 4096; ++i) values[sampled_place(i, 16)] *= are_sampled_large ? 100.0f : 0.001f;
    Contribution contribution(values, {count}, 1);
    const Floats sums = contribution.sums();
    const Selection selection = TopK(0.2, 32, true).select(contribution.ranges());
    EXPECT_EQ(contribution.places(selection), selected(sums, wanted_of(0.2, count)));
  }
}

TEST(TopKTest, SendsAboutAsManyAsAreWantedByASample) {
  for (const int kinds : {0, 1, 3}) {
    const size_t count = 500'000;
    Contribution contribution(random_floats(count, 5, kinds), {count}, 2);
    const Selection selection = TopK(0.01, 32, false).select(contribution.ranges());
    const auto sent = static_cast<double>(contribution.places(selection).size());
    EXPECT_NEAR(sent, 5000.0, kinds == 0 ? 2000.0 : 0.0) << kinds;
  }
}

TEST(TopKTest, EveryInstructionSetGivesTheSameBits) {
  for (const int64_t value_bits : {8, 16, 32}) {
    for (const bool is_exact : {true, false}) {
      for (const size_t size : {1, 7, 31, 33, 255, 257, 3000, 70001}) {
        Bytes encodings[3];
        Floats residuals[3];
        const auto sets = usable_top_k_sets();
        for (size_t i = 0; i < sets.size(); ++i) {
          const TopK codec(0.05, value_bits, is_exact, sets[i]);
          encodings[i].resize(codec.capacity_bytes(static_cast<int64_t>(size)));
          residuals[i] = random_floats(size, 9);
          encodings[i].resize(codec.encode(random_floats(size, 8), residuals[i], encodings[i]));
          EXPECT_TRUE(encodings[i] == encodings[0]) << sets[i].name << " " << size;
          EXPECT_TRUE(same_bits(residuals[i], residuals[0])) << sets[i].name << " " << size;
        }
      }
    }
  }
}

TEST(TopKTest, SendsPartsOfASelectionAndKeepsTheRest) {
  for (const int64_t value_bits : {8, 16, 32}) {
    const TopK codec(0.02, value_bits, true);
    Contribution contribution(random_floats(30000, 4), {10000, 12000, 8000}, 5);
    const Floats sums = contribution.sums();
    const Selection selection = codec.select(contribution.ranges());
    const std::vector<int64_t> places = contribution.places(selection);
    size_t start = 0;
    size_t next = 0;
    for (size_t part = 0; part < 3; ++part) {
      const Floats& values = contribution.values[part];
      Floats& residual = contribution.residuals[part];
      Bytes encoded(static_cast<size_t>(codec.capacity_bytes(static_cast<int64_t>(values.size()))));
      encoded.resize(codec.encode_selected(selection.at(static_cast<int64_t>(start)), values, residual, encoded));
      const Floats decoded = decode(codec, encoded, values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        const float sum = sums[start + i];
        const bool is_sent = next < places.size() && places[next] == static_cast<int64_t>(start + i);
        next += is_sent;
        if (!is_sent) {
          ASSERT_EQ(decoded[i], 0.0f);
        } else {
          ASSERT_NEAR(decoded[i], sum, value_bits == 32 ? 0.0 : 0.02 * std::abs(sum));
        }
        if (!residual.empty()) {
          ASSERT_EQ(residual[i], sum - decoded[i]);
        }
      }
      start += values.size();
    }
    EXPECT_EQ(next, places.size());
  }
}

TEST(TopKTest, SendsEverythingThatIsNotZeroWhereItFits) {
  Floats values(20000, 0.0f);
  for (size_t i = 0; i < 200; ++i) values[i * i % values.size()] = static_cast<float>(i) - 70.5f;
  for (const double ratio : {0.01, 0.5, 1.0}) {
    const TopK codec(ratio, 32, true);
    Bytes encoded(codec.capacity_bytes(20000));
    Floats residual(values.size(), 0.0f);
    encoded.resize(codec.encode(values, residual, encoded));
    EXPECT_TRUE(same_bits(decode(codec, encoded, values.size()), values));
    EXPECT_LT(encoded.size(), 1200U);
    EXPECT_TRUE(same_bits(residual, Floats(values.size(), 0.0f)));
  }
}

TEST(TopKTest, SendsSumsOfFourRanksWhole) {
  const TopK codec(0.01, 32, true);
  const Compressor& results = codec.for_results();
  Floats sum(40000, 0.0f);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const Floats values = random_floats(sum.size(), 30 + rank);
    Bytes encoded(codec.capacity_bytes(40000));
    encoded.resize(codec.encode(values, {}, encoded));
    codec.decode_add(encoded, sum);
  }
  Floats residual(sum.size(), 0.0f);
  Bytes encoded(results.capacity_bytes(40000));
  encoded.resize(results.encode(sum, residual, encoded));
  EXPECT_TRUE(same_bits(decode(results, encoded, sum.size()), sum));
  EXPECT_TRUE(same_bits(decode(codec, encoded, sum.size()), sum)) << "the bytes are the same for both";
  EXPECT_EQ(results.description(), "top_k(ratio=0.04, value_bits=32, exact=True)");
  EXPECT_EQ(TopK(0.3, 8, false).for_results().description(), "top_k(ratio=1, value_bits=8, exact=True)");

  // What does not fit is kept.
  const Floats dense = random_floats(sum.size(), 40);
  encoded.resize(results.capacity_bytes(40000));
  encoded.resize(results.encode(dense, residual, encoded));
  const Floats decoded = decode(results, encoded, dense.size());
  EXPECT_EQ(std::count_if(decoded.begin(), decoded.end(), [](float value) { return value != 0.0f; }), 1600);
  for (size_t i = 0; i < dense.size(); ++i) ASSERT_EQ(decoded[i] + residual[i], dense[i]);
}

TEST(TopKTest, MakesEveryPartNaNWhereAnyValueIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float most = std::numeric_limits<float>::max();
  for (const int64_t value_bits : {8, 16, 32}) {
    const TopK codec(0.01, value_bits, true);
    for (const size_t place : {size_t{0}, size_t{1000}, size_t{3999}}) {
      for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), most}) {
        Floats all = random_floats(4000, 6);
        all[place] = bad;
        Contribution contribution(all, {1000, 1000, 2000}, 5);
        for (Floats& residual : contribution.residuals) std::fill(residual.begin(), residual.end(), 1e37f);
        const Contribution before = contribution;
        // The largest float: with its residual, or as a value of fewer bits, it is infinite.
        const bool is_finite = bad == most && value_bits == 32 && place == 1000;
        const Selection selection = codec.select(contribution.ranges());
        EXPECT_EQ(selection.is_finite, is_finite) << bad << " at " << place << " bits " << value_bits;
        if (is_finite) continue;
        for (size_t part = 0; part < 3; ++part) {
          const Floats& values = contribution.values[part];
          Bytes encoded(static_cast<size_t>(codec.capacity_bytes(static_cast<int64_t>(values.size()))));
          encoded.resize(codec.encode_selected(selection, values, contribution.residuals[part], encoded));
          EXPECT_EQ(encoded.size(), 1U);
          EXPECT_TRUE(all_nan(decode(codec, encoded, values.size())));
          EXPECT_TRUE(same_bits(contribution.residuals[part], before.residuals[part]));
        }
      }
    }
  }
}

// What lies before the value that is not finite has been added to residuals by then, and is taken back.
TEST(TopKTest, GivesResidualsBackWhereALateValueIsNotFinite) {
  constexpr size_t kCount = 10'000;
  const TopK codec(0.01, 32, true);
  Floats first = random_floats(kCount, 1);
  Floats second = random_floats(kCount, 2);
  second[kCount - 1] = std::numeric_limits<float>::infinity();
  const Floats kept[] = {random_floats(kCount, 3), random_floats(kCount, 4)};
  Floats residuals[] = {kept[0], kept[1]};
  const SelectionRange ranges[] = {{first, residuals[0]}, {second, residuals[1]}};
  EXPECT_FALSE(codec.select(ranges).is_finite);
  for (const size_t range : {0, 1}) {
    for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(residuals[range][i], kept[range][i], 1e-6f) << range << ", " << i;
  }
}

TEST(TopKTest, HasTheFormatThatTheReadmeGives) {
  Floats values(100, 0.0f);
  values[0] = 1.0f;
  values[4] = -2.0f;
  const auto encoded = [&](int64_t value_bits) {
    const TopK codec(0.02, value_bits, true);
    Bytes bytes(codec.capacity_bytes(100));
    bytes.resize(codec.encode(values, {}, bytes));
    std::vector<int> numbers;
    for (const std::byte byte : bytes) numbers.push_back(std::to_integer<int>(byte));
    return numbers;
  };
  // Places 1 and 4 apart at order 0: 1, then 00 1 00.
  EXPECT_EQ(encoded(32), (std::vector<int>{1, 2, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 0b00'1'00'1}));
  EXPECT_EQ(encoded(16), (std::vector<int>{1, 2, 0, 0, 0, 0x80, 0x3f, 0, 0xc0, 0b00'1'00'1}));
  // A scale of 2 / 127, which is 0x3c81 as a bfloat16; codes 64 (1 / 0.015747 = 63.504) and -127.
  EXPECT_EQ(encoded(8), (std::vector<int>{1, 2, 0, 0, 0, 0x81, 0x3c, 64, 0x81, 0b00'1'00'1}));
  values.assign(2, 3.0f);
  const TopK codec(1, 32, true);
  Bytes all(codec.capacity_bytes(2));
  EXPECT_EQ(codec.encode(values, {}, all), 9);
  EXPECT_EQ(all[0], std::byte{2});
}

TEST(TopKTest, DecodesToNaNWhatIsNoEncoding) {
  for (const int64_t value_bits : {8, 16, 32}) {
    const TopK codec(0.05, value_bits, true);
    const Floats values = random_floats(1000, 1);
    Bytes encoded(codec.capacity_bytes(1000));
    encoded.resize(codec.encode(values, {}, encoded));
    const auto is_refused = [&](const Bytes& bytes, size_t count) {
      Floats sum(count, 1.0f);
      codec.decode_add(bytes, sum);
      return all_nan(sum) && all_nan(decode(codec, bytes, count));
    };
    EXPECT_FALSE(is_refused(encoded, 1000));
    for (size_t length = 0; length < encoded.size(); ++length) {
      EXPECT_TRUE(is_refused({encoded.begin(), encoded.begin() + static_cast<int64_t>(length)}, 1000)) << length;
    }
    Bytes longer = encoded;
    longer.push_back(std::byte{0});
    EXPECT_TRUE(is_refused(longer, 1000));
    EXPECT_TRUE(is_refused(encoded, 900)) << "a place beyond the range";
    EXPECT_TRUE(is_refused(encoded, 20)) << "more entries than values";
    for (const int form : {0, 3, 0x82, 0xff, 2}) {
      Bytes other = encoded;
      other[0] = static_cast<std::byte>(form);
      EXPECT_TRUE(is_refused(other, 1000)) << form;
    }
    for (const size_t byte : {1, 2, 3, 4}) {
      Bytes other = encoded;
      other[byte] ^= std::byte{0x80};
      EXPECT_TRUE(is_refused(other, 1000)) << "another number of entries";
    }
    EXPECT_TRUE(decode(codec, encoded, 0).empty());
  }
}

TEST(TopKTest, TakesFewBitsForPlaces) {
  // 1 % anywhere: the entropy is 8.08 bits. In clusters: as gradients have them.
  const auto bits_per_place = [](const Floats& values) {
    const TopK codec(0.01, 16, true);
    Bytes encoded(codec.capacity_bytes(static_cast<int64_t>(values.size())));
    const auto bytes = static_cast<double>(codec.encode(values, {}, encoded));
    return 800 * bytes / static_cast<double>(values.size()) - 16;
  };
  Floats values = random_floats(1'000'000, 2);
  EXPECT_LT(bits_per_place(values), 8.7);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= i / 500 % 40 == 0 ? 10.0f : 1.0f;
  EXPECT_LT(bits_per_place(values), 4.7);
}

TEST(TopKTest, NeverTakesMoreThanAllValues) {
  for (const size_t count : {1, 2, 3, 5, 8, 13, 40, 500}) {
    for (const double ratio : {0.01, 0.3, 0.9, 1.0}) {
      for (const int64_t value_bits : {8, 16, 32}) {
        const TopK codec(ratio, value_bits, true);
        Bytes encoded(codec.capacity_bytes(static_cast<int64_t>(count)) + 1, std::byte{0x5a});
        const Floats values = random_floats(count, static_cast<uint32_t>(count));
        const int64_t length = codec.encode(values, {}, std::span(encoded).first(encoded.size() - 1));
        EXPECT_LT(length, static_cast<int64_t>(encoded.size()));
        EXPECT_EQ(encoded.back(), std::byte{0x5a});
        if (ratio == 1 && value_bits == 32) {
          encoded.resize(length);
          EXPECT_TRUE(same_bits(decode(codec, encoded, count), values));
        }
      }
    }
  }
}

TEST(TopKTest, RefusesBadParameters) {
  const auto message = [](const CompressorParameters& parameters) -> std::string {
    try {
      make_compressor("top_k", parameters);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(message({{"ratio", 0}}), "top_k: ratio is 0, expected above 0 and up to 1");
  EXPECT_EQ(message({{"ratio", 1.5}}), "top_k: ratio is 1.5, expected above 0 and up to 1");
  EXPECT_NE(message({{"ratio", nan}}).find("expected above 0 and up to 1"), std::string::npos);
  EXPECT_EQ(message({{"value_bits", 7}}), "top_k: value_bits is 7, expected 32, 16 or 8");
  EXPECT_NE(message({{"exact", 2}}).find("expected True or False"), std::string::npos);
  EXPECT_EQ(make_compressor("top_k", {})->description(), "top_k(ratio=0.01, value_bits=32, exact=True)");
}

}  // namespace
}  // namespace zeropg

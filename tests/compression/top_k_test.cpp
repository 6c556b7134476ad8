#include "compression/top_k.h"

#include <algorithm>
#include <numeric>

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

}  // namespace
}  // namespace zeropg

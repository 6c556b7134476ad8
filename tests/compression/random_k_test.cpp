#include "compression/random_k.h"

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

}  // namespace
}  // namespace zeropg

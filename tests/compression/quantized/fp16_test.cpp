#include "compression/quantized/fp16.h"

#include "tests/compression/compressor_suite.h"

namespace zeropg {
namespace {

// Half a unit in the last of 11 bits, or of a subnormal.
double bound(double value, double) { return std::max(std::abs(value) * 0x1p-11, 0x1p-25); }

const std::vector<CompressorCase> kCases = {{"Fp16", "fp16", {}, 2.0, bound}};
INSTANTIATE_TEST_SUITE_P(Fp16, CompressorSuite, testing::ValuesIn(kCases), case_name);

}  // namespace
}  // namespace zeropg

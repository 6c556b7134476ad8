#include "sharding/offload/host_tier.h"

#include "tests/sharding/offload/tier_suite.h"

namespace zeropg {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, TierSuite, ::testing::Values([] { return make_host_tier(/*is_pinned=*/false); }));

}  // namespace
}  // namespace zeropg

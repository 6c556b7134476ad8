// Norms against torch's, and the same bits however the gradient is cut at block boundaries.
#include "sharding/module/clip.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace zeropg {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double norm_of(const at::Tensor& gradient, double type) {
  return combine_norms({norm_contribution(gradient, type)}, type);
}

TEST(Clip, NormIsTorchs) {
  at::manual_seed(0);
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (int64_t numel : {0, 1, 7, 8, 9, 4095, 4096, 4097, 100003}) {
      const at::Tensor gradient = at::randn({numel}).to(dtype);
      for (double type : {1.0, 2.0, 3.0, 0.5, kInfinity}) {
        const double wanted = numel == 0 ? 0.0 : gradient.to(at::kDouble).norm(type).item<double>();
        EXPECT_NEAR(norm_of(gradient, type), wanted, 1e-12 * wanted) << dtype << " " << numel << " " << type;
      }
    }
  }
}

TEST(Clip, PaddingWithZerosChangesNoBit) {
  const at::Tensor gradient = at::randn({5000});
  const at::Tensor padded = at::cat({gradient, at::zeros({123})});
  EXPECT_EQ(norm_contribution(gradient, 2.0), norm_contribution(padded, 2.0));
}

TEST(Clip, ThreadsChangeNoBit) {
  const at::Tensor gradient = at::randn({1000000});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const double alone = norm_contribution(gradient, 2.0);
  at::set_num_threads(4);
  EXPECT_EQ(norm_contribution(gradient, 2.0), alone);
  at::set_num_threads(threads);
}

TEST(Clip, NotANumberAndInfinityWin) {
  at::Tensor gradient = at::ones({10000});
  gradient[5000] = kInfinity;
  EXPECT_EQ(norm_of(gradient, 2.0), kInfinity);
  EXPECT_EQ(norm_of(gradient, kInfinity), kInfinity);
  gradient[17] = std::nan("");
  EXPECT_TRUE(std::isnan(norm_of(gradient, 2.0)));
  EXPECT_TRUE(std::isnan(norm_of(gradient, kInfinity)));
  EXPECT_TRUE(std::isnan(combine_norms({1.0, std::nan(""), 2.0}, kInfinity)));
}

TEST(Clip, ContributionsCombineInOrder) {
  EXPECT_EQ(combine_norms({9.0, 16.0}, 2.0), 5.0);
  EXPECT_EQ(combine_norms({3.0, 7.0, 2.0}, kInfinity), 7.0);
  EXPECT_EQ(combine_norms({}, 2.0), 0.0);
}

}  // namespace
}  // namespace zeropg

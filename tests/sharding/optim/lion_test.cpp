#include "tests/sharding/optim/optimizer_suite.h"

namespace zeropg {
namespace {

void reference(double& parameter, double gradient, std::vector<double>& state, const Hyperparameters& given,
               int64_t /*step*/) {
  gradient = given.at("maximize") != 0 ? -gradient : gradient;
  const double blend = given.at("beta1") * state[0] + (1 - given.at("beta1")) * gradient;
  const double direction = blend > 0 ? 1 : blend < 0 ? -1 : 0;
  parameter -= given.at("lr") * (direction + given.at("weight_decay") * parameter);
  state[0] = given.at("beta2") * state[0] + (1 - given.at("beta2")) * gradient;
}

Hyperparameters given(double beta1, double beta2, double weight_decay, bool maximize) {
  return {{"lr", 1e-2}, {"beta1", beta1}, {"beta2", beta2}, {"weight_decay", weight_decay}, {"maximize", maximize}};
}

INSTANTIATE_TEST_SUITE_P(Lion, OptimizerSuite,
                         testing::Values(OptimizerCase{"defaults", "lion", given(0.9, 0.99, 0, false), reference},
                                         OptimizerCase{"weight_decay", "lion", given(0.95, 0.98, 0.1, true), reference},
                                         OptimizerCase{"without_betas", "lion", given(0, 0, 0, false), reference}),
                         case_name);

TEST(Lion, moves_by_lr_against_the_sign_and_keeps_nan) {
  const auto optimizer = make_optimizer("lion");
  FlatView view{.master = at::zeros({4}), .gradient = at::zeros({4}), .state = {at::zeros({4})}, .parameter_out = {}};
  float* const gradient = view.gradient.data_ptr<float>();
  gradient[0] = 1e-6f;
  gradient[1] = -3.0f;
  gradient[3] = std::numeric_limits<float>::quiet_NaN();
  optimizer->step(view, {.hyperparameters = given(0.9, 0.99, 0, false)});
  const float* const master = view.master.const_data_ptr<float>();
  EXPECT_EQ(master[0], -1e-2f);
  EXPECT_EQ(master[1], 1e-2f);
  EXPECT_EQ(master[2], 0.0f);
  EXPECT_TRUE(std::isnan(master[3]));
}

TEST(Lion, refuses_a_beta_of_1) {
  const auto optimizer = make_optimizer("lion");
  FlatView view{.master = at::zeros({1}), .gradient = at::zeros({1}), .state = {at::zeros({1})}, .parameter_out = {}};
  EXPECT_THROW(optimizer->step(view, {.hyperparameters = given(0.9, 1, 0, false)}), c10::ValueError);
}

}  // namespace
}  // namespace zeropg

#include "tests/sharding/optim/optimizer_suite.h"

namespace zeropg {
namespace {

void reference(double& parameter, double gradient, std::vector<double>& state, const Hyperparameters& given,
               int64_t step) {
  gradient = given.at("maximize") != 0 ? -gradient : gradient;
  gradient += given.at("weight_decay") * parameter;
  if (step == 1) {
    state[0] += given.at("initial_accumulator_value");
  }
  state[0] += gradient * gradient;
  const double lr = given.at("lr") / (1 + static_cast<double>(step - 1) * given.at("lr_decay"));
  parameter -= lr * gradient / (std::sqrt(state[0]) + given.at("eps"));
}

Hyperparameters given(double lr_decay, double weight_decay, double initial, bool maximize) {
  return {{"lr", 1e-2},  {"lr_decay", lr_decay}, {"weight_decay", weight_decay}, {"initial_accumulator_value", initial},
          {"eps", 1e-8}, {"maximize", maximize}};
}

INSTANTIATE_TEST_SUITE_P(Adagrad, OptimizerSuite,
                         testing::Values(OptimizerCase{"defaults", "adagrad", given(0, 0, 0, false), reference},
                                         OptimizerCase{"lr_decay", "adagrad", given(0.5, 0, 0, false), reference},
                                         OptimizerCase{"weight_decay", "adagrad", given(0.1, 0.1, 0, true), reference}),
                         case_name);

TEST(Adagrad, first_step_begins_with_the_initial_sum) {
  const auto optimizer = make_optimizer("adagrad");
  FlatView view{.master = at::zeros({1}), .gradient = at::zeros({1}), .state = {at::zeros({1})}, .parameter_out = {}};
  view.gradient.fill_(2.0);
  optimizer->step(view, {.hyperparameters = given(0, 0, 0.5, false), .step = 1});
  EXPECT_EQ(view.state[0].item<float>(), 4.5f);
  optimizer->step(view, {.hyperparameters = given(0, 0, 0.5, false), .step = 2});
  EXPECT_EQ(view.state[0].item<float>(), 8.5f);
}

TEST(Adagrad, first_step_goes_on_from_a_sum_that_is_there) {
  const auto optimizer = make_optimizer("adagrad");
  FlatView view{.master = at::zeros({1}), .gradient = at::ones({1}), .state = {at::ones({1})}, .parameter_out = {}};
  optimizer->step(view, {.hyperparameters = given(0, 0, 0, false), .step = 1});
  EXPECT_EQ(view.state[0].item<float>(), 2.0f);
}

}  // namespace
}  // namespace zeropg

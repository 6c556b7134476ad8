#include "tests/sharding/optim/optimizer_suite.h"

namespace zeropg {
namespace {

void reference(double& parameter, double gradient, std::vector<double>& state, const Hyperparameters& given,
               int64_t step) {
  gradient = given.at("maximize") != 0 ? -gradient : gradient;
  gradient += given.at("weight_decay") * parameter;
  const double momentum = given.at("momentum");
  if (momentum != 0) {
    state[0] = step == 1 ? gradient : momentum * state[0] + (1 - given.at("dampening")) * gradient;
    gradient = given.at("nesterov") != 0 ? gradient + momentum * state[0] : state[0];
  }
  parameter -= given.at("lr") * gradient;
}

Hyperparameters given(double momentum, double dampening, double weight_decay, bool nesterov, bool maximize) {
  return {{"lr", 1e-2},           {"momentum", momentum}, {"dampening", dampening}, {"weight_decay", weight_decay},
          {"nesterov", nesterov}, {"maximize", maximize}};
}

INSTANTIATE_TEST_SUITE_P(
    Sgd, OptimizerSuite,
    testing::Values(OptimizerCase{"plain", "sgd", given(0, 0, 0, false, false), reference},
                    OptimizerCase{"weight_decay_maximize", "sgd", given(0, 0, 0.1, false, true), reference},
                    OptimizerCase{"momentum", "sgd", given(0.9, 0, 0, false, false), reference},
                    OptimizerCase{"dampening", "sgd", given(0.9, 0.5, 0.1, false, true), reference},
                    OptimizerCase{"nesterov", "sgd", given(0.9, 0, 0.1, true, false), reference}),
    case_name);

TEST(Sgd, first_step_with_momentum_is_undampened) {
  const auto optimizer = make_optimizer("sgd");
  FlatView view{.master = at::zeros({1}), .gradient = at::zeros({1}), .state = {at::zeros({1})}, .parameter_out = {}};
  view.gradient.fill_(2.0);
  optimizer->step(view, {.hyperparameters = given(0.9, 0.5, 0, false, false), .step = 1});
  EXPECT_EQ(view.state[0].item<float>(), 2.0f);
}

TEST(Sgd, refuses_nesterov_without_momentum) {
  const auto optimizer = make_optimizer("sgd");
  FlatView view{.master = at::zeros({1}), .gradient = at::zeros({1}), .state = {}, .parameter_out = {}};
  EXPECT_THROW(optimizer->step(view, {.hyperparameters = given(0, 0, 0, true, false)}), c10::ValueError);
}

}  // namespace
}  // namespace zeropg

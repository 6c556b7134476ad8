#include "tests/sharding/optim/optimizer_suite.h"

namespace zeropg {
namespace {

void reference(double& parameter, double gradient, std::vector<double>& state, const Hyperparameters& given,
               int64_t step, bool is_decoupled) {
  const double lr = given.at("lr"), beta1 = given.at("beta1"), beta2 = given.at("beta2");
  gradient = given.at("maximize") != 0 ? -gradient : gradient;
  if (is_decoupled) {
    parameter *= 1 - lr * given.at("weight_decay");
  } else {
    gradient += given.at("weight_decay") * parameter;
  }
  state[0] = beta1 * state[0] + (1 - beta1) * gradient;
  state[1] = beta2 * state[1] + (1 - beta2) * gradient * gradient;
  double second = state[1];
  if (given.at("amsgrad") != 0) {
    second = state[2] = std::max(state[2], state[1]);
  }
  const double corrected = std::sqrt(second / (1 - std::pow(beta2, step)));
  parameter -= lr * (state[0] / (1 - std::pow(beta1, step))) / (corrected + given.at("eps"));
}

void reference_adam(double& p, double g, std::vector<double>& s, const Hyperparameters& h, int64_t step) {
  reference(p, g, s, h, step, false);
}
void reference_adamw(double& p, double g, std::vector<double>& s, const Hyperparameters& h, int64_t step) {
  reference(p, g, s, h, step, true);
}

Hyperparameters given(double beta1, double weight_decay, bool amsgrad, bool maximize) {
  return {{"lr", 1e-2},         {"beta1", beta1},      {"beta2", 0.99}, {"eps", 1e-8}, {"weight_decay", weight_decay},
          {"amsgrad", amsgrad}, {"maximize", maximize}};
}

INSTANTIATE_TEST_SUITE_P(
    AdamW, OptimizerSuite,
    testing::Values(OptimizerCase{"adamw", "adamw", given(0.9, 0.1, false, false), reference_adamw},
                    OptimizerCase{"adamw_amsgrad_maximize", "adamw", given(0.9, 0.1, true, true), reference_adamw},
                    OptimizerCase{"adam_with_weight_decay", "adam", given(0.9, 0.1, false, false), reference_adam},
                    OptimizerCase{"adam_without_first_moment", "adam", given(0.0, 0.0, false, false), reference_adam},
                    OptimizerCase{"adam_amsgrad", "adam", given(0.5, 0.0, true, false), reference_adam}),
    case_name);

INSTANTIATE_TEST_SUITE_P(
    CompactAdamW, OptimizerSuite,
    testing::Values(OptimizerCase{"adamw_16bit", "adamw_16bit", given(0.9, 0.1, false, false), reference_adamw, 0.02},
                    OptimizerCase{"adam_16bit", "adam_16bit", given(0.5, 0.1, false, true), reference_adam, 0.02},
                    OptimizerCase{"adamw_8bit", "adamw_8bit", given(0.9, 0.1, false, false), reference_adamw, 0.3},
                    OptimizerCase{"adam_8bit", "adam_8bit", given(0.0, 0.1, false, false), reference_adam, 0.3}),
    case_name);

TEST(AdamW, refuses_an_eps_with_which_padding_would_spoil_its_block) {
  for (const char* name : {"adamw_16bit", "adamw_8bit"}) {
    const auto optimizer = make_optimizer(name);
    Hyperparameters hyperparameters = given(0.9, 0.1, false, false);
    hyperparameters["eps"] = 0.0;
    FlatView view{.master = at::zeros({1}), .gradient = at::zeros({1}), .state = {}, .parameter_out = {}};
    for (const StateSlot& slot : optimizer->state_slots(hyperparameters)) {
      view.state.push_back(at::zeros({entries_of(slot.format, 1)}, entry_dtype(slot.format, at::kFloat)));
    }
    EXPECT_THROW(optimizer->step(view, {.hyperparameters = hyperparameters}), c10::ValueError) << name;
  }
}

TEST(AdamW, first_moment_with_beta1_zero_is_exactly_the_gradient) {
  const auto optimizer = make_optimizer("adamw");
  FlatView view{.master = at::zeros({1}),
                .gradient = at::zeros({1}),
                .state = {at::zeros({1}), at::zeros({1})},
                .parameter_out = {}};
  view.state[0].fill_(1e8);
  view.gradient.fill_(1.25e-7);
  optimizer->step(view, {.hyperparameters = given(0.0, 0.0, false, false), .step = 2});
  EXPECT_EQ(view.state[0].item<float>(), 1.25e-7f);
}

TEST(AdamW, refuses_a_beta_of_one) {
  const auto optimizer = make_optimizer("adamw");
  FlatView view{.master = at::zeros({1}),
                .gradient = at::zeros({1}),
                .state = {at::zeros({1}), at::zeros({1})},
                .parameter_out = {}};
  EXPECT_THROW(optimizer->step(view, {.hyperparameters = given(1.0, 0.0, false, false)}), c10::ValueError);
}

}  // namespace
}  // namespace zeropg

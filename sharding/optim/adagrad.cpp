#include "sharding/optim/adagrad.h"

namespace zeropg {
namespace {

constexpr std::string_view kName = "adagrad";

struct Coefficients {
  double gradient_factor;  // negative when maximizing
  double weight_decay;
  double initial_sum;  // what the first step adds to the slot; 0 in later ones
  double eps;
  double negative_step_size;
};

template <typename T>
struct AdagradRule {
  using Scalar = T;
  static constexpr int kSlots = 1;

  explicit AdagradRule(const Coefficients& c)
      : gradient_factor(static_cast<T>(c.gradient_factor)),
        weight_decay(static_cast<T>(c.weight_decay)),
        initial_sum(static_cast<T>(c.initial_sum)),
        eps(static_cast<T>(c.eps)),
        negative_step_size(static_cast<T>(c.negative_step_size)) {}

  [[gnu::always_inline]] inline void update(T& parameter, T gradient, T* state) const {
    gradient = gradient * gradient_factor;
    gradient = gradient + weight_decay * parameter;
    state[0] = (state[0] + initial_sum) + gradient * gradient;
    parameter = parameter + (negative_step_size * gradient) / (square_root(state[0]) + eps);
  }

  T gradient_factor;
  T weight_decay;
  T initial_sum;
  T eps;
  T negative_step_size;
};

Coefficients coefficients_of(const StepArguments& arguments) {
  const Hyperparameters& given = arguments.hyperparameters;
  TORCH_CHECK_VALUE(arguments.step >= 1, "[zeropg] adagrad: step is ", arguments.step,
                    ", expected 1 in the first step");
  const double steps_before = static_cast<double>(arguments.step - 1);
  const double initial_sum = hyperparameter(given, "initial_accumulator_value");
  return {
      .gradient_factor = signed_gradient_factor(arguments),
      .weight_decay = hyperparameter(given, "weight_decay"),
      .initial_sum = arguments.step == 1 ? initial_sum : 0.0,
      .eps = hyperparameter(given, "eps"),
      .negative_step_size = -(hyperparameter(given, "lr") / (1.0 + steps_before * hyperparameter(given, "lr_decay"))),
  };
}

}  // namespace

OptimizerTraits Adagrad::traits() const {
  return {.name = kName,
          .hyperparameters = {{"lr", 1e-2},
                              {"lr_decay", 0.0},
                              {"weight_decay", 0.0},
                              {"initial_accumulator_value", 0.0},
                              {"eps", 1e-10},
                              {"maximize", 0.0}},
          .counts_steps = true,
          .torch_classes = {"Adagrad"},
          .torch_flags = {}};
}

std::vector<StateSlot> Adagrad::state_slots(const Hyperparameters&) const { return {"sum"}; }

void Adagrad::step(const FlatView& view, const StepArguments& arguments) const {
  check_view(kName, view, state_slots(arguments.hyperparameters));
  const Coefficients coefficients = coefficients_of(arguments);
  update_in_dtype<AdagradRule>(coefficients, view, isa_);
}

}  // namespace zeropg

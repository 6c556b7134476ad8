#include "sharding/optim/lion.h"

namespace zeropg {
namespace {

constexpr std::string_view kName = "lion";

struct Coefficients {
  double gradient_factor;  // negative when maximizing
  double shrink;           // of the parameter: 1 - lr * weight_decay
  double beta1;
  double first_weight;  // 1 - beta1
  double beta2;
  double second_weight;  // 1 - beta2
  double negative_lr;
};

template <typename T>
struct LionRule {
  using Scalar = T;
  static constexpr int kSlots = 1;

  explicit LionRule(const Coefficients& c)
      : gradient_factor(static_cast<T>(c.gradient_factor)),
        shrink(static_cast<T>(c.shrink)),
        beta1(static_cast<T>(c.beta1)),
        first_weight(static_cast<T>(c.first_weight)),
        beta2(static_cast<T>(c.beta2)),
        second_weight(static_cast<T>(c.second_weight)),
        negative_lr(static_cast<T>(c.negative_lr)) {}

  [[gnu::always_inline]] inline void update(T& parameter, T gradient, T* state) const {
    gradient = gradient * gradient_factor;
    const T blend = state[0] * beta1 + first_weight * gradient;
    const T if_not_positive = blend < T(0) ? T(-1) : blend;  // 0, or a NaN
    const T direction = blend > T(0) ? T(1) : if_not_positive;
    parameter = parameter * shrink + negative_lr * direction;
    state[0] = state[0] * beta2 + second_weight * gradient;
  }

  T gradient_factor;
  T shrink;
  T beta1;
  T first_weight;
  T beta2;
  T second_weight;
  T negative_lr;
};

Coefficients coefficients_of(const StepArguments& arguments) {
  const Hyperparameters& given = arguments.hyperparameters;
  const double lr = hyperparameter(given, "lr");
  const double beta1 = checked_beta(kName, given, "beta1");
  const double beta2 = checked_beta(kName, given, "beta2");
  return {
      .gradient_factor = signed_gradient_factor(arguments),
      .shrink = 1.0 - lr * hyperparameter(given, "weight_decay"),
      .beta1 = beta1,
      .first_weight = 1.0 - beta1,
      .beta2 = beta2,
      .second_weight = 1.0 - beta2,
      .negative_lr = -lr,
  };
}

}  // namespace

OptimizerTraits Lion::traits() const {
  return {.name = kName,
          .hyperparameters = {{"lr", 1e-4}, {"beta1", 0.9}, {"beta2", 0.99}, {"weight_decay", 0.0}, {"maximize", 0.0}},
          .counts_steps = false,
          .torch_classes = {"Lion"},
          .torch_flags = {}};
}

std::vector<StateSlot> Lion::state_slots(const Hyperparameters&) const { return {"exp_avg"}; }

void Lion::step(const FlatView& view, const StepArguments& arguments) const {
  check_view(kName, view, state_slots(arguments.hyperparameters));
  const Coefficients coefficients = coefficients_of(arguments);
  update_in_dtype<LionRule>(coefficients, view, isa_);
}

}  // namespace zeropg

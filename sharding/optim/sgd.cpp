#include "sharding/optim/sgd.h"

namespace zeropg {
namespace {

constexpr std::string_view kName = "sgd";

struct Coefficients {
  double gradient_factor;  // negative when maximizing
  double weight_decay;
  double momentum;
  double retained;       // share of the old momentum_buffer: momentum, or 0 in the first step
  double gradient_gain;  // 1 - dampening, or 1 in the first step
  double negative_lr;
  bool nesterov;
};

template <typename T, bool kMomentum>
struct SgdRule {
  using Scalar = T;
  static constexpr int kSlots = kMomentum ? 1 : 0;

  explicit SgdRule(const Coefficients& c)
      : gradient_factor(static_cast<T>(c.gradient_factor)),
        weight_decay(static_cast<T>(c.weight_decay)),
        momentum(static_cast<T>(c.momentum)),
        retained(static_cast<T>(c.retained)),
        gradient_gain(static_cast<T>(c.gradient_gain)),
        negative_lr(static_cast<T>(c.negative_lr)),
        nesterov(c.nesterov) {}

  [[gnu::always_inline]] inline void update(T& parameter, T gradient, T* state) const {
    gradient = gradient * gradient_factor;
    gradient = gradient + weight_decay * parameter;
    T direction = gradient;
    if constexpr (kMomentum) {
      state[0] = state[0] * retained + gradient_gain * gradient;
      const T ahead = gradient + momentum * state[0];
      direction = nesterov ? ahead : state[0];
    }
    parameter = parameter + negative_lr * direction;
  }

  T gradient_factor;
  T weight_decay;
  T momentum;
  T retained;
  T gradient_gain;
  T negative_lr;
  bool nesterov;
};

template <typename T>
using PlainRule = SgdRule<T, false>;
template <typename T>
using MomentumRule = SgdRule<T, true>;

Coefficients coefficients_of(const StepArguments& arguments) {
  const Hyperparameters& given = arguments.hyperparameters;
  const double momentum = hyperparameter(given, "momentum");
  const double dampening = hyperparameter(given, "dampening");
  const bool nesterov = hyperparameter(given, "nesterov") != 0.0;
  const bool is_first = arguments.step <= 1;
  TORCH_CHECK_VALUE(!nesterov || (momentum > 0.0 && dampening == 0.0), "[zeropg] sgd: nesterov with momentum ",
                    momentum, " and dampening ", dampening, ", expected a positive momentum and no dampening");
  return {
      .gradient_factor = signed_gradient_factor(arguments),
      .weight_decay = hyperparameter(given, "weight_decay"),
      .momentum = momentum,
      .retained = is_first ? 0.0 : momentum,
      .gradient_gain = is_first ? 1.0 : 1.0 - dampening,
      .negative_lr = -hyperparameter(given, "lr"),
      .nesterov = nesterov,
  };
}

}  // namespace

OptimizerTraits Sgd::traits() const {
  return {.name = kName,
          .hyperparameters = {{"lr", 1e-3},
                              {"momentum", 0.9},
                              {"dampening", 0.0},
                              {"weight_decay", 0.0},
                              {"nesterov", 0.0},
                              {"maximize", 0.0}},
          .counts_steps = false,
          .torch_classes = {"SGD"},
          .torch_flags = {}};
}

std::vector<StateSlot> Sgd::state_slots(const Hyperparameters& hyperparameters) const {
  if (hyperparameter(hyperparameters, "momentum") != 0.0) {
    return {"momentum_buffer"};
  }
  return {};
}

void Sgd::step(const FlatView& view, const StepArguments& arguments) const {
  const bool has_momentum = hyperparameter(arguments.hyperparameters, "momentum") != 0.0;
  check_view(kName, view, state_slots(arguments.hyperparameters));
  const Coefficients coefficients = coefficients_of(arguments);
  if (has_momentum) {
    update_in_dtype<MomentumRule>(coefficients, view, isa_);
  } else {
    update_in_dtype<PlainRule>(coefficients, view, isa_);
  }
}

}  // namespace zeropg

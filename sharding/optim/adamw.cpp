#include "sharding/optim/adamw.h"

#include <cmath>
#include <limits>

namespace zeropg {
namespace {

std::string_view name_of(WeightDecay decay, StateBits bits) {
  const bool is_decoupled = decay == WeightDecay::kDecoupled;
  switch (bits) {
    case StateBits::k16:
      return is_decoupled ? "adamw_16bit" : "adam_16bit";
    case StateBits::k8:
      return is_decoupled ? "adamw_8bit" : "adam_8bit";
    case StateBits::k32:
      break;
  }
  return is_decoupled ? "adamw" : "adam";
}

bool has_amsgrad(StateBits bits, const Hyperparameters& given) {
  return bits == StateBits::k32 && hyperparameter(given, "amsgrad") != 0.0;
}

// Everything that does not depend on the element, computed in double as torch does, then rounded once.
struct Coefficients {
  double gradient_factor;  // negative when maximizing
  double shrink;           // of the parameter: 1 - lr * weight_decay, or 1
  double coupled_decay;    // weight_decay, or 0
  double first_weight;     // 1 - beta1
  double beta2;
  double second_weight;  // 1 - beta2
  double inverse_sqrt_correction2;
  double eps;
  double negative_step_size;
};

template <typename T, bool kAmsgrad>
struct AdamWRule {
  using Scalar = T;
  static constexpr int kSlots = kAmsgrad ? 3 : 2;

  explicit AdamWRule(const Coefficients& c)
      : gradient_factor(static_cast<T>(c.gradient_factor)),
        shrink(static_cast<T>(c.shrink)),
        coupled_decay(static_cast<T>(c.coupled_decay)),
        // As at::lerp: from the nearer end, so that beta1 = 0 gives exactly the gradient.
        lerp_from_gradient(c.first_weight >= 0.5),
        lerp_weight(static_cast<T>(lerp_from_gradient ? c.first_weight - 1.0 : c.first_weight)),
        beta2(static_cast<T>(c.beta2)),
        second_weight(static_cast<T>(c.second_weight)),
        inverse_sqrt_correction2(static_cast<T>(c.inverse_sqrt_correction2)),
        eps(static_cast<T>(c.eps)),
        negative_step_size(static_cast<T>(c.negative_step_size)) {}

  [[gnu::always_inline]] inline void update(T& parameter, T gradient, T* state) const {
    gradient = gradient * gradient_factor;
    gradient = gradient + coupled_decay * parameter;
    parameter = parameter * shrink;
    const T base = lerp_from_gradient ? gradient : state[0];
    state[0] = base + lerp_weight * (gradient - state[0]);
    state[1] = state[1] * beta2 + (second_weight * gradient) * gradient;
    T second = state[1];
    if constexpr (kAmsgrad) {
      state[2] = state[1] <= state[2] ? state[2] : state[1];  // a NaN in state[1] is taken, as torch.maximum does
      second = state[2];
    }
    const T denominator = square_root(second) * inverse_sqrt_correction2 + eps;
    parameter = parameter + (negative_step_size * state[0]) / denominator;
  }

  T gradient_factor;
  T shrink;
  T coupled_decay;
  bool lerp_from_gradient;
  T lerp_weight;
  T beta2;
  T second_weight;
  T inverse_sqrt_correction2;
  T eps;
  T negative_step_size;
};

template <typename T>
using PlainRule = AdamWRule<T, false>;
template <typename T>
using AmsgradRule = AdamWRule<T, true>;

Coefficients coefficients_of(WeightDecay decay, const StepArguments& arguments) {
  const Hyperparameters& given = arguments.hyperparameters;
  const double lr = hyperparameter(given, "lr");
  const double beta1 = checked_beta("adamw", given, "beta1");
  const double beta2 = checked_beta("adamw", given, "beta2");
  const double weight_decay = hyperparameter(given, "weight_decay");
  TORCH_CHECK_VALUE(arguments.step >= 1, "[zeropg] adamw: step is ", arguments.step, ", expected 1 in the first step");
  const double count = static_cast<double>(arguments.step);
  const bool is_decoupled = decay == WeightDecay::kDecoupled;
  return {
      .gradient_factor = signed_gradient_factor(arguments),
      .shrink = is_decoupled ? 1.0 - lr * weight_decay : 1.0,
      .coupled_decay = is_decoupled ? 0.0 : weight_decay,
      .first_weight = 1.0 - beta1,
      .beta2 = beta2,
      .second_weight = 1.0 - beta2,
      .inverse_sqrt_correction2 = 1.0 / std::sqrt(1.0 - std::pow(beta2, count)),
      .eps = hyperparameter(given, "eps"),
      .negative_step_size = -(lr / (1.0 - std::pow(beta1, count))),
  };
}

}  // namespace

// torch's AdamW is an Adam whose param groups say so, and each may be told to be the other.
OptimizerTraits AdamW::traits() const {
  const bool is_decoupled = weight_decay_ == WeightDecay::kDecoupled;
  const bool is_compact = bits_ != StateBits::k32;
  OptimizerTraits traits{
      .name = name_of(weight_decay_, bits_),
      .hyperparameters =
          {{"lr", 1e-3}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 0.01}, {"maximize", 0.0}},
      .counts_steps = true,
      .torch_classes = {"zeropg.optim.AdamW", "zeropg.optim.Adam"},
      .torch_flags = {{"decoupled_weight_decay", is_decoupled ? 1 : 0}, {"state_bits", static_cast<int64_t>(bits_)}}};
  if (!is_compact) {
    traits.hyperparameters.push_back({"amsgrad", 0.0});
    traits.torch_classes.insert(traits.torch_classes.begin(), {"AdamW", "Adam"});
  }
  if (!is_decoupled) {
    for (size_t pair = 0; pair < traits.torch_classes.size(); pair += 2) {
      std::swap(traits.torch_classes[pair], traits.torch_classes[pair + 1]);
    }
  }
  return traits;
}

std::vector<StateSlot> AdamW::state_slots(const Hyperparameters& hyperparameters) const {
  switch (bits_) {
    case StateBits::k16:
      return {{"exp_avg", StateFormat::kBFloat16}, {"exp_avg_sq", StateFormat::kBFloat16}};
    case StateBits::k8:
      return {{"exp_avg", StateFormat::kSigned8}, {"exp_avg_sq", StateFormat::kUnsigned8}};
    case StateBits::k32:
      break;
  }
  if (has_amsgrad(bits_, hyperparameters)) {
    return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  }
  return {"exp_avg", "exp_avg_sq"};
}

void AdamW::step(const FlatView& view, const StepArguments& arguments) const {
  const std::vector<StateSlot> slots = state_slots(arguments.hyperparameters);
  check_view(name_of(weight_decay_, bits_), view, slots);
  const Coefficients coefficients = coefficients_of(weight_decay_, arguments);
  // Padding has no gradient and no state. Without eps it becomes NaN, and so would the block that it shares.
  TORCH_CHECK_VALUE(
      bits_ == StateBits::k32 || static_cast<float>(coefficients.eps) >= std::numeric_limits<float>::min(), "[zeropg] ",
      name_of(weight_decay_, bits_), ": eps is ", coefficients.eps, ", expected at least 1.2e-38 with state in ",
      static_cast<int>(bits_), " bits");
  if (has_amsgrad(bits_, arguments.hyperparameters)) {
    update_in_dtype<AmsgradRule>(coefficients, view, isa_);
  } else {
    update_in_dtype<PlainRule>(coefficients, view, isa_, {slots, arguments.step});
  }
}

}  // namespace zeropg

// The contract of Optimizer, once. A test file of an optimizer instantiates it with its cases:
//   INSTANTIATE_TEST_SUITE_P(Sgd, OptimizerSuite, testing::ValuesIn(cases), case_name);
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "sharding/optim/registry.h"

namespace zeropg {

// One element, in double, straight from the paper or from torch's single-tensor code.
using ReferenceStep = void (*)(double& parameter, double gradient, std::vector<double>& state,
                               const Hyperparameters& given, int64_t step);

struct OptimizerCase {
  std::string label;
  std::string optimizer;
  Hyperparameters hyperparameters;
  ReferenceStep reference;
  double tolerance = 0;  // of state in fewer bits, in learning rates per step
};

inline std::string case_name(const testing::TestParamInfo<OptimizerCase>& info) { return info.param.label; }

class OptimizerSuite : public testing::TestWithParam<OptimizerCase> {
 protected:
  // Master, gradient, state of one run; steps with changing gradients.
  struct Flat {
    at::Tensor master, gradient, parameter_out;
    std::vector<at::Tensor> state;
    std::vector<StateSlot> slots;

    FlatView cut(int64_t start, int64_t stop) const {
      return zeropg::cut({master, gradient, state, parameter_out}, slots, start, stop);
    }
  };

  std::vector<StateSlot> slots() const { return optimizer()->state_slots(GetParam().hyperparameters); }

  bool is_compact() const {
    const std::vector<StateSlot> all = slots();
    return std::any_of(all.begin(), all.end(), [](const StateSlot& s) { return s.format != StateFormat::kMaster; });
  }

  std::vector<at::ScalarType> master_dtypes() const {
    return is_compact() ? std::vector{at::kFloat} : std::vector{at::kFloat, at::kDouble};
  }

  Flat make_flat(int64_t numel, at::ScalarType dtype) const {
    const auto generated = [&](int64_t seed) {
      at::Tensor values = at::empty({numel}, at::kDouble);
      for (int64_t i = 0; i < numel; ++i) {
        values.data_ptr<double>()[i] = std::sin(static_cast<double>(i * 7 + seed)) * std::pow(10.0, i % 5 - 3);
      }
      return values.to(dtype);
    };
    Flat flat{.master = generated(1), .gradient = generated(2), .parameter_out = {}, .state = {}, .slots = slots()};
    for (const StateSlot& slot : flat.slots) {
      flat.state.push_back(at::zeros({entries_of(slot.format, numel)}, entry_dtype(slot.format, dtype)));
    }
    return flat;
  }

  std::unique_ptr<Optimizer> optimizer(Isa isa = best_isa()) const { return make_optimizer(GetParam().optimizer, isa); }

  StepArguments arguments(int64_t step, double factor = 1.0) const {
    return {.hyperparameters = GetParam().hyperparameters, .step = step, .gradient_factor = factor};
  }

  void run(const Optimizer& optimizer, Flat& flat, int64_t steps = 3, std::vector<int64_t> cuts = {}) const {
    cuts.push_back(flat.master.numel());
    for (int64_t step = 1; step <= steps; ++step) {
      int64_t start = 0;
      for (const int64_t stop : cuts) {
        optimizer.step(flat.cut(start, stop), arguments(step));
        start = stop;
      }
    }
  }

  static bool same_bits(const Flat& left, const Flat& right) {
    bool same = left.master.equal(right.master);
    for (size_t slot = 0; slot < left.state.size(); ++slot) {
      same = same && left.state[slot].equal(right.state[slot]);
    }
    return same;
  }
};

TEST_P(OptimizerSuite, compact_state_agrees_with_the_reference_on_average) {
  if (!is_compact()) {
    GTEST_SKIP() << "its state has the master's bits";
  }
  constexpr int64_t kNumel = 4001;
  Flat flat = make_flat(kNumel, at::kFloat);
  flat.gradient = flat.gradient.sign().mul(1e-3).add(flat.gradient);
  const at::Tensor before = flat.master.clone();
  at::Tensor expected = flat.master.to(at::kDouble);
  run(*optimizer(), flat, 5);
  for (int64_t i = 0; i < kNumel; ++i) {
    std::vector<double> state(flat.state.size(), 0.0);
    for (int64_t step = 1; step <= 5; ++step) {
      GetParam().reference(expected.data_ptr<double>()[i], flat.gradient.data_ptr<float>()[i], state,
                           GetParam().hyperparameters, step);
    }
  }
  const double lr = GetParam().hyperparameters.at("lr");
  const at::Tensor error = (flat.master.to(at::kDouble) - expected).div(5 * lr);
  EXPECT_LT(error.abs().max().item<double>(), GetParam().tolerance);
  const at::Tensor outward = error * (expected - before.to(at::kDouble)).sign();
  EXPECT_LT(std::abs(outward.mean().item<double>()), GetParam().tolerance / 10);
}

TEST_P(OptimizerSuite, agrees_with_the_reference) {
  if (is_compact()) {
    GTEST_SKIP() << "its state is rounded";
  }
  Flat flat = make_flat(101, at::kDouble);
  Flat single = make_flat(101, at::kFloat);
  std::vector<std::vector<double>> states(101, std::vector<double>(flat.state.size(), 0.0));
  at::Tensor expected = flat.master.clone();
  run(*optimizer(), flat, 5);
  run(*optimizer(), single, 5);
  for (int64_t i = 0; i < 101; ++i) {
    for (int64_t step = 1; step <= 5; ++step) {
      GetParam().reference(expected.data_ptr<double>()[i], flat.gradient.data_ptr<double>()[i], states[i],
                           GetParam().hyperparameters, step);
    }
  }
  EXPECT_TRUE(at::allclose(flat.master, expected, 1e-14, 1e-15));
  EXPECT_TRUE(at::allclose(single.master.to(at::kDouble), expected, 2e-6, 1e-6));
  for (size_t slot = 0; slot < flat.state.size(); ++slot) {
    EXPECT_NEAR(flat.state[slot].data_ptr<double>()[100], states[100][slot], 1e-14);
  }
}

TEST_P(OptimizerSuite, every_instruction_set_gives_the_same_bits) {
  for (const at::ScalarType dtype : master_dtypes()) {
    Flat plain = make_flat(3001, dtype);
    run(*optimizer(Isa::kPlain), plain);
    for (const Isa isa : supported_isas()) {
      Flat flat = make_flat(3001, dtype);
      run(*optimizer(isa), flat);
      EXPECT_TRUE(same_bits(plain, flat)) << "isa " << static_cast<int>(isa) << ", " << dtype;
    }
  }
}

TEST_P(OptimizerSuite, cutting_the_range_anywhere_gives_the_same_bits) {
  for (const at::ScalarType dtype : master_dtypes()) {
    Flat whole = make_flat(5000, dtype);
    run(*optimizer(), whole);
    for (std::vector<int64_t> cuts : {std::vector<int64_t>{16, 32, 1024, 4992}, {1, 2, 5, 1023, 1025, 4999}, {0}}) {
      if (is_compact()) {  // anywhere between blocks
        std::transform(cuts.begin(), cuts.end(), cuts.begin(),
                       [](int64_t at) { return at / kStateBlock * kStateBlock; });
      }
      Flat pieces = make_flat(5000, dtype);
      run(*optimizer(), pieces, 3, cuts);
      EXPECT_TRUE(same_bits(whole, pieces)) << "cuts at " << cuts;
    }
  }
}

TEST_P(OptimizerSuite, two_threads_give_the_same_bits_as_one) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  Flat one = make_flat(200'001, at::kFloat);
  run(*optimizer(), one);
  at::set_num_threads(2);
  Flat two = make_flat(200'001, at::kFloat);
  run(*optimizer(), two);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two));
}

TEST_P(OptimizerSuite, parameter_out_is_the_rounded_master) {
  for (const at::ScalarType dtype : master_dtypes()) {
    for (const at::ScalarType out : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
      for (const Isa isa : supported_isas()) {
        Flat flat = make_flat(1500, dtype);
        flat.parameter_out = at::zeros({1500}, flat.master.options().dtype(out));
        run(*optimizer(isa), flat);
        EXPECT_TRUE(flat.parameter_out.equal(flat.master.to(out))) << dtype << " to " << out;
      }
    }
  }
}

TEST_P(OptimizerSuite, parameter_out_keeps_nan_and_infinity) {
  Flat flat = make_flat(100, at::kFloat);
  flat.gradient.zero_();
  flat.master.data_ptr<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  flat.parameter_out = at::zeros({100}, at::kBFloat16);
  run(*optimizer(), flat, 1);
  EXPECT_TRUE(std::isnan(flat.parameter_out.to(at::kFloat).data_ptr<float>()[3]));
  EXPECT_FALSE(std::isnan(flat.parameter_out.to(at::kFloat).data_ptr<float>()[4]));
}

TEST_P(OptimizerSuite, a_16_bit_gradient_equals_the_same_gradient_in_float32) {
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    Flat flat = make_flat(3001, at::kFloat);
    flat.gradient = flat.gradient.to(narrow);
    Flat wide = make_flat(3001, at::kFloat);
    wide.gradient = flat.gradient.to(at::kFloat);
    run(*optimizer(), flat);
    run(*optimizer(), wide);
    EXPECT_TRUE(same_bits(flat, wide)) << narrow;
  }
}

TEST_P(OptimizerSuite, gradient_factor_equals_a_scaled_gradient) {
  Flat folded = make_flat(300, at::kFloat);
  Flat scaled = make_flat(300, at::kFloat);
  scaled.gradient.mul_(0.3);
  optimizer()->step(folded.cut(0, 300), arguments(1, 0.3));
  optimizer()->step(scaled.cut(0, 300), arguments(1));
  EXPECT_TRUE(same_bits(folded, scaled));
}

TEST_P(OptimizerSuite, takes_empty_and_tiny_ranges) {
  for (const int64_t numel : {0, 1, 2, 15, 17}) {
    Flat flat = make_flat(numel, at::kFloat);
    Flat padded = make_flat(numel + 64, at::kFloat);
    padded.master.slice(0, numel).zero_();
    padded.gradient.slice(0, numel).zero_();
    run(*optimizer(), flat);
    run(*optimizer(), padded);
    EXPECT_TRUE(flat.master.equal(padded.master.slice(0, 0, numel)));
  }
}

TEST_P(OptimizerSuite, zero_gradient_and_state_leave_padding_zero) {
  Flat flat = make_flat(64, at::kFloat);
  flat.master.zero_();
  flat.gradient.zero_();
  run(*optimizer(), flat);
  EXPECT_TRUE(flat.master.equal(at::zeros({64})));
}

TEST_P(OptimizerSuite, flushes_float32_denormals_and_restores_the_mode) {
  Flat flat = make_flat(64, at::kFloat);
  flat.gradient.fill_(1e-40);
  flat.master.fill_(1e-40);
  run(*optimizer(), flat, 1);
  for (const at::Tensor& state : flat.state) {
    EXPECT_EQ(state.count_nonzero().item<int64_t>(), 0);
  }
  volatile float smallest = std::numeric_limits<float>::min();
  EXPECT_NE(smallest / 4.0f, 0.0f);
}

TEST_P(OptimizerSuite, keeps_float64_denormals) {
  if (is_compact() || make_flat(1, at::kDouble).state.empty()) {
    GTEST_SKIP() << "this optimizer keeps no state in float64 here";
  }
  bool has_denormal = false;
  for (const double gradient : {1e-310, 1e-155}) {  // for momenta, and for squares
    Flat flat = make_flat(64, at::kDouble);
    flat.master.zero_();
    flat.gradient.fill_(gradient);
    run(*optimizer(), flat, 1);
    const double kept = std::abs(flat.state[0].data_ptr<double>()[5]);
    has_denormal = has_denormal || (kept > 0.0 && kept < std::numeric_limits<double>::min());
  }
  EXPECT_TRUE(has_denormal);
}

TEST_P(OptimizerSuite, names_a_missing_hyperparameter) {
  for (const auto& [name, typical] : optimizer()->traits().hyperparameters) {
    Flat flat = make_flat(8, at::kFloat);
    StepArguments given = arguments(1);
    ASSERT_EQ(given.hyperparameters.erase(std::string(name)), 1) << name;
    try {
      optimizer()->step(flat.cut(0, 8), given);
      FAIL() << "no error without " << name;
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST_P(OptimizerSuite, refuses_what_does_not_fit) {
  const auto attempt = [&](auto change) {
    Flat flat = make_flat(8, at::kFloat);
    FlatView view = flat.cut(0, 8);
    change(view);
    optimizer()->step(view, arguments(1));
  };
  EXPECT_THROW(attempt([](FlatView& view) { view.gradient = view.gradient.slice(0, 0, 7); }), c10::ValueError);
  EXPECT_THROW(attempt([](FlatView& view) { view.gradient = at::Tensor(); }), c10::ValueError);
  EXPECT_THROW(attempt([](FlatView& view) { view.gradient = view.gradient.to(at::kDouble); }), c10::TypeError);
  EXPECT_THROW(attempt([](FlatView& view) { view.master = view.master.to(at::kBFloat16); }), c10::TypeError);
  EXPECT_THROW(attempt([](FlatView& view) { view.state.push_back(view.master); }), c10::ValueError);
  EXPECT_THROW(attempt([](FlatView& view) { view.parameter_out = at::zeros({8}, at::kLong); }), c10::TypeError);
  EXPECT_THROW(attempt([](FlatView& view) { view.master = at::zeros({16}).slice(0, 0, 16, 2); }), c10::ValueError);
}

}  // namespace zeropg

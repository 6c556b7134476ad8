#include "sharding/optim/registry.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zeropg {
namespace {

TEST(Registry, every_optimizer_has_the_name_that_it_is_asked_by) {
  for (const std::string_view name : optimizer_names()) {
    EXPECT_EQ(make_optimizer(name)->traits().name, name);
  }
}

TEST(Registry, names_what_it_has_when_asked_for_something_else) {
  try {
    make_optimizer("lamb");
    FAIL();
  } catch (const c10::ValueError& error) {
    for (const std::string_view name : optimizer_names()) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << name;
    }
  }
}

TEST(Registry, typical_hyperparameters_are_accepted) {
  for (const std::string_view name : optimizer_names()) {
    const auto optimizer = make_optimizer(name);
    StepArguments arguments;
    for (const auto& [key, typical] : optimizer->traits().hyperparameters) {
      arguments.hyperparameters.emplace(key, typical);
    }
    FlatView view{.master = at::ones({3}), .gradient = at::ones({3}), .state = {}, .parameter_out = {}};
    for (const StateSlot& slot : optimizer->state_slots(arguments.hyperparameters)) {
      view.state.push_back(at::zeros({entries_of(slot.format, 3)}, entry_dtype(slot.format, at::kFloat)));
    }
    optimizer->step(view, arguments);
    EXPECT_LT(view.master.max().item<double>(), 1.0) << name;
  }
}

// Otherwise a param group of torch's class could be stepped by either.
TEST(Registry, a_class_of_torch_and_its_flags_choose_one_optimizer) {
  std::set<std::pair<std::string_view, std::vector<std::pair<std::string_view, int64_t>>>> chosen;
  for (const std::string_view name : optimizer_names()) {
    const OptimizerTraits traits = make_optimizer(name)->traits();
    for (const std::string_view torch_class : traits.torch_classes) {
      EXPECT_TRUE(chosen.emplace(torch_class, traits.torch_flags).second) << name << " and another: " << torch_class;
    }
  }
}

}  // namespace
}  // namespace zeropg

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"
#include "sharding/optim/registry.h"

namespace zeropg {
namespace {

struct Run {
  int64_t start;
  int64_t stop;
};

at::Tensor cut(const at::Tensor& flat, const Run& run) { return flat.narrow(0, run.start, run.stop - run.start); }

void step(const Optimizer& optimizer, const at::Tensor& master, const at::Tensor& gradient,
          const std::vector<at::Tensor>& state, const std::optional<at::Tensor>& parameter_out,
          const std::pair<int64_t, int64_t>& range, const StepArguments& arguments) {
  const Run run{range.first, range.second};
  FlatView view{.master = cut(master, run), .gradient = cut(gradient, run), .state = {}, .parameter_out = {}};
  for (const at::Tensor& slot : state) {
    view.state.push_back(cut(slot, run));
  }
  if (parameter_out.has_value()) {
    view.parameter_out = cut(*parameter_out, run);
  }
  optimizer.step(view, arguments);
}

Isa isa_by_name(const std::optional<std::string>& name) {
  if (!name.has_value()) {
    return best_isa();
  }
  const std::vector<Isa> supported = supported_isas();
  for (size_t index = 0; index < supported.size(); ++index) {
    constexpr std::string_view kNames[] = {"plain", "avx2", "avx512"};
    if (*name == kNames[static_cast<size_t>(supported[index])]) {
      return supported[index];
    }
  }
  TORCH_CHECK_VALUE(false, "[zeropg] make_optimizer: this CPU does not run '", *name,
                    "'; known are plain, avx2, avx512");
}

}  // namespace

void bind_optim(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Optimizer>(m, "Optimizer", "An elementwise optimizer over flat ranges; see sharding/optim/optimizer.h.")
      .def_property_readonly("name", [](const Optimizer& self) { return self.traits().name; })
      .def_property_readonly(
          "hyperparameters",
          [](const Optimizer& self) {
            py::dict result;  // in their order
            for (const auto& [name, typical] : self.traits().hyperparameters) {
              result[py::str(std::string(name))] = typical;
            }
            return result;
          },
          "The names that step() demands, with values to measure with.")
      .def_property_readonly(
          "counts_steps", [](const Optimizer& self) { return self.traits().counts_steps; },
          "Whether those classes keep `step` beside the state slots.")
      .def_property_readonly(
          "torch_classes", [](const Optimizer& self) { return self.traits().torch_classes; },
          "Names in torch.optim, or else in zeropg.optim, of the classes whose update it is; the first is that by its "
          "defaults.")
      .def_property_readonly(
          "torch_flags",
          [](const Optimizer& self) {
            py::dict result;
            for (const auto& [name, value] : self.traits().torch_flags) {
              result[py::str(std::string(name))] = value;
            }
            return result;
          },
          "Flags of those classes' param groups that must be so.")
      .def("state_slots", &Optimizer::state_slots, py::arg("hyperparameters"))
      .def(
          "step",
          [](const Optimizer& optimizer, const at::Tensor& master, const at::Tensor& gradient,
             const std::vector<at::Tensor>& state, const std::optional<at::Tensor>& parameter_out,
             const std::pair<int64_t, int64_t>& range, const Hyperparameters& hyperparameters, int64_t step_count,
             double gradient_factor) {
            const WithoutGil no_gil;
            step(optimizer, master, gradient, state, parameter_out, range,
                 {.hyperparameters = hyperparameters, .step = step_count, .gradient_factor = gradient_factor});
          },
          py::arg("master"), py::arg("gradient"), py::arg("state"), py::arg("parameter_out"), py::kw_only(),
          py::arg("range"), py::arg("hyperparameters"), py::arg("step"), py::arg("gradient_factor") = 1.0,
          "Updates elements [range[0], range[1]) of the 1-D tensors in place; parameter_out may be None.");
  m.def(
      "make_optimizer",
      [](const std::string& name, const std::optional<std::string>& isa) {
        return make_optimizer(name, isa_by_name(isa));
      },
      py::arg("name"), py::arg("isa") = py::none());
  m.def("optimizer_names", &optimizer_names);
}

}  // namespace zeropg

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"
#include "sharding/optim/registry.h"

namespace zeropg {
namespace {

void step(const Optimizer& optimizer, const at::Tensor& master, const at::Tensor& gradient,
          const std::vector<at::Tensor>& state, const std::optional<at::Tensor>& parameter_out,
          const std::pair<int64_t, int64_t>& range, const StepArguments& arguments) {
  const FlatView view{master, gradient, state, parameter_out.value_or(at::Tensor())};
  const std::vector<StateSlot> slots = optimizer.state_slots(arguments.hyperparameters);
  optimizer.step(cut(view, slots, range.first, range.second), arguments);
}

// The entries of a slot that hold `values`, [numel] in any floating dtype, rounded to the nearest.
at::Tensor pack(const StateSlot& slot, const at::Tensor& values) {
  const at::Tensor flat = values.detach().to(at::kCPU, at::kFloat).reshape({-1}).contiguous();
  at::Tensor entries = at::empty({entries_of(slot.format, flat.numel())}, entry_dtype(slot.format, at::kFloat));
  if (slot.format == StateFormat::kMaster) return entries.copy_(flat);
  store_state(slot.format, flat.const_data_ptr<float>(), entries.data_ptr(), flat.numel());
  return entries;
}

// [numel] bfloat16, or as they are in the master's dtype.
at::Tensor unpack(const StateSlot& slot, const at::Tensor& entries, int64_t numel) {
  TORCH_CHECK_VALUE(entries.dim() == 1 && entries.is_contiguous() && entries.is_cpu() &&
                        entries.numel() == entries_of(slot.format, numel),
                    "[zeropg] unpack: ", entries.sizes(), " entries of ", slot.name, ", expected contiguous [",
                    entries_of(slot.format, numel), "] on the CPU");
  if (!is_blocked(slot.format)) return entries.clone();
  TORCH_CHECK_TYPE(entries.scalar_type() == at::kByte, "[zeropg] unpack: entries are ", entries.scalar_type());
  at::Tensor values = at::empty({numel}, at::kFloat);
  widen_state(best_isa(), slot.format, entries.const_data_ptr(), values.data_ptr<float>(), numel);
  return values.to(at::kBFloat16);
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
  py::class_<StateSlot>(m, "StateSlot", "One state tensor of an optimizer; see sharding/optim/state_format.h.")
      .def_property_readonly("name", [](const StateSlot& self) { return self.name; })
      .def_property_readonly(
          "is_packed", [](const StateSlot& self) { return is_blocked(self.format); },
          "Whether its entries are blocks of codes, not elements.")
      .def(
          "entries", [](const StateSlot& self, int64_t numel) { return entries_of(self.format, numel); },
          py::arg("numel"), "The entries of the first `numel` elements.")
      .def(
          "dtype", [](const StateSlot& self, c10::ScalarType master) { return entry_dtype(self.format, master); },
          py::arg("master"), "Of an entry, beside masters of that dtype.")
      .def("pack", &pack, py::arg("values"), ReleaseGil(),
           "The entries that hold `values`, rounded to the nearest; beside masters in float32.")
      .def("unpack", &unpack, py::arg("entries"), py::arg("numel"), ReleaseGil(),
           "The elements, which are bfloat16 where they are fewer bits than the master's.");
  m.attr("state_block") = kStateBlock;
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
          "Names in torch.optim, or else in zeropg.optim, of the classes whose update it is; \"zeropg.optim.AdamW\" "
          "where torch has one of that name. The first is that by torch_flags and its defaults.")
      .def_property_readonly(
          "torch_flags",
          [](const Optimizer& self) {
            py::dict result;
            for (const auto& [name, value] : self.traits().torch_flags) {
              result[py::str(std::string(name))] = value;
            }
            return result;
          },
          "Options of those classes' param groups that must be so; flags are 0 and 1.")
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

// Python's view of sharding/offload/: the tier of a model, vectors in it, the step through it.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"
#include "sharding/offload/pipelined_step.h"
#include "sharding/offload/registry.h"

namespace py = pybind11;

namespace zeropg {
namespace {

std::shared_ptr<Offload> make_offload(const std::string& device, const std::string& directory, int64_t threads,
                                      bool is_pinned, int64_t buffer_bytes, int64_t rank, int64_t world_size) {
  TierOptions options;
  options.is_pinned = is_pinned;
  options.file = {.directory = directory, .threads = threads, .rank = rank, .world_size = world_size};
  return std::make_shared<Offload>(make_tier(device, options), buffer_bytes);
}

}  // namespace

void bind_offload(py::module_& m) {
  py::class_<Offload, std::shared_ptr<Offload>>(
      m, "Offload", "What one rank of a model keeps in a tier; see sharding/offload/offload.h.")
      .def_property_readonly("reserved_bytes", [](const Offload& self) { return self.tier().reserved_bytes(); })
      .def_property_readonly("buffer_bytes", &Offload::buffer_bytes)
      .def_property_readonly("staging_bytes", &Offload::staging_bytes)
      .def("describe", [](const Offload& self) { return self.tier().describe(); });
  py::class_<TierTraits>(m, "TierTraits", "What a tier is; see sharding/offload/registry.h.")
      .def_property_readonly("device", [](const TierTraits& self) { return self.device; })
      .def_property_readonly(
          "has_path", [](const TierTraits& self) { return self.has_path; }, "Whether users name its directory.")
      .def_property_readonly(
          "is_host_memory", [](const TierTraits& self) { return self.is_host_memory; },
          "Whether a model on the CPU computes there anyway.");
  m.def("tiers", &tiers, "Every tier.");
  m.def("make_offload", &make_offload, py::kw_only(), py::arg("device"), py::arg("directory"), py::arg("threads"),
        py::arg("is_pinned"), py::arg("buffer_bytes"), py::arg("rank"), py::arg("world_size"), ReleaseGil());

  py::class_<TieredVector, std::shared_ptr<TieredVector>>(
      m, "TieredVector", "A vector of numbers that lives in a tier; see sharding/offload/tiered_vector.h.")
      .def(py::init<std::shared_ptr<Offload>, const std::string&, int64_t, c10::ScalarType>(), py::arg("offload"),
           py::arg("what"), py::arg("numel"), py::arg("dtype"), ReleaseGil())
      .def(py::init([](std::shared_ptr<Offload> offload, const std::string& what, int64_t elements,
                       c10::ScalarType master, const StateSlot& slot) {
             return std::make_shared<TieredVector>(std::move(offload), what, elements, master, slot.format);
           }),
           py::arg("offload"), py::arg("what"), py::arg("elements"), py::arg("master"), py::arg("slot"), ReleaseGil())
      .def_property_readonly("numel", &TieredVector::numel)
      .def_property_readonly("bytes", &TieredVector::bytes)
      .def_property_readonly("chunk_elements", &TieredVector::chunk_elements, "Elements that a chunk holds.")
      .def("read", py::overload_cast<int64_t, int64_t>(&TieredVector::read), py::arg("start"), py::arg("stop"),
           ReleaseGil(), "A copy of elements [start, stop).")
      .def("write", &TieredVector::write, py::arg("start"), py::arg("values"), ReleaseGil())
      .def("clear", &TieredVector::clear, ReleaseGil(), "All zeros.");

  py::class_<StepRun>(m, "StepRun", "A stretch [start, stop) of a flat range whose elements take the same step.")
      .def(py::init([](int64_t start, int64_t stop, const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                       int64_t step, double gradient_factor, size_t slots) {
             return StepRun{start, stop, &optimizer, {hyperparameters, step, gradient_factor}, slots};
           }),
           py::kw_only(), py::arg("start"), py::arg("stop"), py::arg("optimizer"), py::arg("hyperparameters"),
           py::arg("step"), py::arg("gradient_factor"), py::arg("slots"), py::keep_alive<1, 4>());
  py::class_<TieredFlat>(m, "TieredFlat", "One flat parameter in one step; see sharding/offload/pipelined_step.h.")
      .def(py::init([](std::shared_ptr<TieredVector> tiered_master, const std::optional<at::Tensor>& master,
                       std::vector<std::shared_ptr<TieredVector>> state, const at::Tensor& gradient,
                       const std::optional<at::Tensor>& parameter_out, std::vector<StepRun> runs) {
             return TieredFlat{std::move(tiered_master),
                               master.value_or(at::Tensor()),
                               std::move(state),
                               gradient,
                               parameter_out.value_or(at::Tensor()),
                               std::move(runs)};
           }),
           py::kw_only(), py::arg("tiered_master"), py::arg("master"), py::arg("state"), py::arg("gradient"),
           py::arg("parameter_out"), py::arg("runs"));
  m.def("pipelined_step", &pipelined_step, py::arg("offload"), py::arg("flats"), ReleaseGil(),
        "Steps all runs of all flat parameters; blocks.");
}

}  // namespace zeropg

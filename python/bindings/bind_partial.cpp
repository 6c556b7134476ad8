// Python's view of backend/partial: averages that do not wait for late ranks.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/partial/partial_reducer.h"
#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"

namespace py = pybind11;

namespace zeropg {
namespace {

// Its threads are joined without the GIL.
struct LetGo {
  void operator()(PartialReducer* reducer) const {
    const WithoutGil no_gil;
    delete reducer;
  }
};

}  // namespace

void bind_partial(py::module_& m) {
  py::class_<PartialReducer, std::unique_ptr<PartialReducer, LetGo>>(
      m, "PartialReducer", "Averages of gradients that do not wait for late ranks; see zeropg.PartialReduction.")
      .def(py::init([](c10::intrusive_ptr<c10d::ProcessGroup> rounds, c10::intrusive_ptr<c10d::ProcessGroup> messages,
                       std::vector<int64_t> numels, bool in_float64, double tolerance, int64_t max_steps_behind,
                       double patience, std::chrono::milliseconds timeout) {
             return std::unique_ptr<PartialReducer, LetGo>(
                 new PartialReducer(std::move(rounds), std::move(messages),
                                    {std::move(numels), in_float64 ? at::kDouble : at::kFloat, tolerance,
                                     max_steps_behind, patience, timeout}));
           }),
           py::arg("rounds"), py::arg("messages"), py::arg("numels"), py::kw_only(), py::arg("in_float64"),
           py::arg("tolerance"), py::arg("max_steps_behind"), py::arg("patience"), py::arg("timeout"))
      .def("post", &PartialReducer::post, ReleaseGil())
      .def("wait", &PartialReducer::wait, ReleaseGil())
      .def("owed", &PartialReducer::owed, ReleaseGil())
      .def("owe", &PartialReducer::owe, ReleaseGil())
      .def("close", &PartialReducer::close, ReleaseGil());
}

}  // namespace zeropg

// What the tools (doctor, bench, simulate) need of the core beyond what training uses.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/bootstrap/sockets/tcp_socket.h"
#include "backend/collectives/reduce/reduce_kernels.h"
#include "backend/collectives/select/registry.h"
#include "backend/platform/cpu/copy.h"
#include "backend/topology/cpu_domain_probe.h"
#include "backend/topology/topology_file.h"
#include "backend/topology/topology_probe.h"
#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"

namespace zeropg {
namespace {

std::vector<std::string> reduction_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : usable_instruction_sets()) {
    names.emplace_back(set.name);
  }
  return names;
}

std::vector<std::string> collective_algorithms(const std::string& operation) {
  std::vector<std::string> names;
  for (const Algorithm& algorithm : algorithms()) {
    if (operation == traits_of(algorithm.op).name) {
      names.emplace_back(algorithm.name);
    }
  }
  return names;
}

void copy_tensor(const at::Tensor& destination, const at::Tensor& source, bool is_streaming) {
  TORCH_CHECK_VALUE(destination.is_cpu() && source.is_cpu() && destination.is_contiguous() && source.is_contiguous() &&
                        destination.nbytes() == source.nbytes(),
                    "[zeropg] copy_bytes: expected two contiguous CPU tensors of the same size");
  copy_bytes(destination.mutable_data_ptr(), source.const_data_ptr(), static_cast<int64_t>(source.nbytes()),
             is_streaming);
}

}  // namespace

void bind_tools(pybind11::module_& m) {
  namespace py = pybind11;
#ifdef ZEROPG_WITH_CUDA
  m.attr("built_with_cuda") = true;
#else
  m.attr("built_with_cuda") = false;
#endif
  m.def("reduction_instruction_sets", &reduction_instruction_sets,
        "Those that this processor runs; the last one is used.");
  py::class_<OpTraits>(m, "OpTraits", "What sets one operation apart from the others; see collective_spec.h.")
      .def_property_readonly("name", [](const OpTraits& self) { return self.name; })
      .def_property_readonly("has_blocks", &OpTraits::has_blocks, "Whether a tensor has a block for each rank.")
      .def_property_readonly(
          "has_tensors", [](const OpTraits& self) { return self.input != BlockCount::kNone; },
          "Whether it moves anything.");
  m.def(
      "collective_operations", [] { return std::vector<OpTraits>(std::begin(kOpTraits), std::end(kOpTraits)); },
      "Every operation that is planned.");
  m.def("collective_algorithms", &collective_algorithms, py::arg("operation"),
        "Names of the algorithms of an operation such as all_reduce, for one node and for several.");
  m.def(
      "interface_addresses",
      [](const std::string& interfaces) {
        std::vector<std::pair<std::string, std::string>> found;
        for (InterfaceAddress& address : interface_addresses(InterfaceRules(interfaces))) {
          found.emplace_back(std::move(address.interface), std::move(address.host));
        }
        return found;
      },
      py::arg("interfaces"),
      "(name, address) of the interfaces that BackendOptions(interfaces=...) allows, of those up.");
  m.def("probe_host_id", &probe_host_id, "Equal for two processes exactly when they can share memory.");
  m.def("probe_domain_id", &probe_domain_id,
        "Equal for two processes of a node that are bound to CPUs with one L3 cache or NUMA node; else empty.");
  py::class_<Rack>(m, "Rack", "A rack of a topology file; see topology_file.h.")
      .def_readonly("nodes", &Rack::nodes)
      .def_readonly("node_gbps", &Rack::node_gbps, "Of each node's link, in 1e9 bytes/s; 0: the file says nothing.")
      .def_readonly("uplink_gbps", &Rack::uplink_gbps, "Likewise, of the rack's way to other racks.");
  m.def("parse_racks", &parse_racks, py::arg("json"),
        "The racks of a topology file. ValueError where it contradicts itself.");
  m.def("copy_bytes", &copy_tensor, py::arg("destination"), py::arg("source"), py::arg("is_streaming"), ReleaseGil(),
        "Copies a tensor's bytes, past the caches if is_streaming.");
}

}  // namespace zeropg

// What a collective will take on a group that need not exist, for `python -m zeropg simulate`.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "backend/simulator/cost_estimate.h"
#include "backend/transport/network/byte_stream.h"
#include "backend/transport/shm/shm_arena.h"
#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"

namespace zeropg {
namespace {

OpKind op_of_name(const std::string& name) {
  std::string known;
  for (size_t op = 0; op < kOpKindCount; ++op) {
    if (name == kOpTraits[op].name) {
      return static_cast<OpKind>(op);
    }
    known += (known.empty() ? "" : ", ") + std::string(kOpTraits[op].name);
  }
  TORCH_CHECK_VALUE(false, "[zeropg] simulate: unknown operation '", name, "', expected one of ", known, ".");
}

// Rings and windows of the sizes that a group of so many ranks has.
void fit_to_ranks(EstimateRequest& request) {
  int32_t ranks = 0;
  int32_t largest = 1;  // node
  for (const auto& node : request.nodes) {
    ranks += static_cast<int32_t>(node.size());
    largest = std::max(largest, static_cast<int32_t>(node.size()));
  }
  request.mailbox_bytes = shared_mailbox_bytes(request.mailbox_bytes, largest);
  request.window_bytes = shared_window_bytes(request.window_bytes, std::max(1, ranks));
}

pybind11::dict simulate_collective(const std::string& op, int64_t bytes, std::vector<std::vector<int32_t>> nodes,
                                   int32_t element_bytes, int32_t root, std::string algorithm, double barrier_us,
                                   double memory_bytes_per_us, double hop_us, double message_us,
                                   double network_bytes_per_us, std::vector<double> node_bytes_per_us,
                                   std::vector<std::vector<int32_t>> racks, std::vector<double> uplink_bytes_per_us) {
  EstimateRequest request{.op = op_of_name(op),
                          .bytes = bytes,
                          .element_bytes = element_bytes,
                          .root = root,
                          .nodes = std::move(nodes),
                          .algorithm = std::move(algorithm),
                          .model = {.barrier_us = barrier_us,
                                    .bytes_per_us = memory_bytes_per_us,
                                    .hop_us = hop_us,
                                    .network_bytes_per_us = network_bytes_per_us,
                                    .message_us = message_us,
                                    .node_bytes_per_us = std::move(node_bytes_per_us),
                                    .uplink_bytes_per_us = std::move(uplink_bytes_per_us)},
                          .racks = std::move(racks)};
  fit_to_ranks(request);
  Estimate result;
  {
    const WithoutGil no_gil;
    result = estimate(request);
  }
  pybind11::dict answer;
  answer["algorithm"] = result.algorithm;
  answer["time_us"] = result.time_us;
  answer["is_simulated"] = result.is_simulated;
  answer["is_chosen"] = result.is_chosen;
  answer["link_bytes"] = result.link_bytes;
  return answer;
}

}  // namespace

void bind_simulate(pybind11::module_& m) {
  namespace py = pybind11;
  const CostModel model;
  m.def("simulate", &simulate_collective, py::arg("op"), py::arg("bytes"), py::arg("nodes"), py::kw_only(),
        py::arg("element_bytes") = 4, py::arg("root") = 0, py::arg("algorithm") = "",
        py::arg("barrier_us") = model.barrier_us, py::arg("memory_bytes_per_us") = model.bytes_per_us,
        py::arg("hop_us") = model.hop_us, py::arg("message_us") = model.message_us,
        py::arg("network_bytes_per_us") = model.network_bytes_per_us,
        py::arg("node_bytes_per_us") = std::vector<double>(), py::arg("racks") = std::vector<std::vector<int32_t>>(),
        py::arg("uplink_bytes_per_us") = std::vector<double>(),
        "Time and bytes per link of one collective on the given nodes (lists of ranks): 'algorithm', 'time_us', "
        "'is_simulated' (False: too large, the time is the cost formula's), 'is_chosen' (a group would choose it) and "
        "'link_bytes' [from][to]. `racks` are lists of "
        "indices into `nodes`; the nodes of one share its uplink to the others. `bytes` is one rank's block. Raises "
        "ValueError for what cannot be planned.");
}

}  // namespace zeropg

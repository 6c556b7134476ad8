#include "backend/simulator/cost_estimate.h"

#include <algorithm>
#include <stdexcept>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/select/registry.h"
#include "backend/simulator/schedule_simulator.h"

namespace zeropg {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 60;
constexpr int64_t kMostSteps = 4'000'000;  // about 1 GB of them

CollectiveSpec spec_of(const EstimateRequest& request) {
  CollectiveSpec spec{.op = request.op,
                      .root = request.root,
                      .element_bytes = request.element_bytes,
                      .bytes = request.bytes,
                      .bank_bytes = request.bank_bytes,
                      .mailbox_bytes = request.mailbox_bytes,
                      .nodes = request.nodes,
                      .window_bytes = request.window_bytes};
  int32_t world_size = 0;
  for (const auto& node : request.nodes) world_size += static_cast<int32_t>(node.size());
  spec.world_size = world_size;
  if (traits_of(request.op).has_counts) {
    spec.send_bytes.assign(world_size, request.bytes);
    spec.receive_bytes.assign(world_size, request.bytes);
  }
  return spec;
}

void check(const EstimateRequest& request, const CollectiveSpec& spec) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("estimate: " + what); };
  if (spec.world_size < 1) refuse("there are no ranks; give the ranks of at least one node");
  if (std::any_of(request.nodes.begin(), request.nodes.end(), [](const auto& node) { return node.empty(); })) {
    refuse("a node has no ranks; leave it out");
  }
  if (request.element_bytes < 1 || request.bytes < 0 || request.bytes % request.element_bytes != 0) {
    refuse(std::to_string(request.bytes) + " bytes are not a whole number of elements of " +
           std::to_string(request.element_bytes) + " bytes");
  }
  if (request.bytes > kMostBytes / spec.world_size) {
    refuse(std::to_string(request.bytes) + " bytes for each of " + std::to_string(spec.world_size) +
           " ranks are more than a machine can address");
  }
  if (request.root < 0 || request.root >= spec.world_size) {
    refuse("root " + std::to_string(request.root) + " is not one of " + std::to_string(spec.world_size) + " ranks");
  }
  if (!request.node_bytes_per_us.empty() && request.node_bytes_per_us.size() != request.nodes.size()) {
    refuse(std::to_string(request.node_bytes_per_us.size()) + " link speeds for " +
           std::to_string(request.nodes.size()) + " nodes; give one per node");
  }
  const auto is_positive = [](double speed) { return speed > 0; };
  if (!is_positive(request.model.bytes_per_us) || !is_positive(request.model.network_bytes_per_us) ||
      !std::all_of(request.node_bytes_per_us.begin(), request.node_bytes_per_us.end(), is_positive)) {
    refuse("a speed is not positive");
  }
}

SimulatorOptions simulator_options(const EstimateRequest& request, const CollectiveSpec& spec,
                                   const Placement& placement) {
  SimulatorOptions options{.world_size = spec.world_size,
                           .bank_bytes = spec.bank_bytes,
                           .mailbox_bytes = spec.mailbox_bytes,
                           .model = request.model,
                           .nodes = spec.nodes,
                           .window_bytes = spec.window_bytes,
                           .moves_bytes = false};
  if (request.node_bytes_per_us.empty()) return options;
  options.link = [&](int32_t from, int32_t to) -> SimulatedLink {
    const int32_t a = placement.node_of(from);
    const int32_t b = placement.node_of(to);
    if (a == b) return {};
    const double speed = std::min(request.node_bytes_per_us[a] / placement.node_size(a),
                                  request.node_bytes_per_us[b] / placement.node_size(b));
    return {.latency_us = request.model.hop_us, .bytes_per_us = speed};
  };
  return options;
}

// Of all ranks together, from the plan for a few chunks: the steps of a long plan would themselves be too many.
double expected_steps(const EstimateRequest& request, const Algorithm& algorithm) {
  const CollectiveSpec whole = spec_of(request);
  const int64_t blocks = traits_of(request.op).has_blocks() ? whole.world_size : 1;
  const int64_t numel = std::max<int64_t>(1, (2 << 20) / request.element_bytes / blocks);
  EstimateRequest sample = request;
  sample.bytes = std::min(request.bytes, numel * request.element_bytes);
  CollectiveSpec spec = spec_of(sample);
  spec.rank = spec.root;
  const double repeats = sample.bytes == 0 ? 1 : static_cast<double>(request.bytes) / sample.bytes;
  return repeats * algorithm.plan(spec).steps.size() * spec.world_size;
}

// A direct algorithm is never chosen here: nothing says where tensors lie. But it may be named.
const Algorithm& algorithm_of(const EstimateRequest& request, const CollectiveSpec& spec) {
  const Algorithm* named = request.algorithm.empty() ? nullptr : find_algorithm(request.algorithm);
  if (named == nullptr || !named->is_direct || named->op != spec.op) {
    return select_algorithm(spec, request.algorithm, request.model);
  }
  if (!named->supports(spec)) {
    throw std::invalid_argument("estimate: " + request.algorithm + " does not support several nodes; name another one");
  }
  return *named;
}

}  // namespace

Estimate estimate(const EstimateRequest& request) {
  CollectiveSpec spec = spec_of(request);
  check(request, spec);
  const Placement placement(spec);
  const Algorithm& algorithm = algorithm_of(request, spec);
  Estimate result{.algorithm = std::string(algorithm.name), .link_bytes = {}};
  if (expected_steps(request, algorithm) > kMostSteps) {
    result.time_us = estimate_us(algorithm.cost(spec), request.model);
    return result;
  }
  SimulatedOperation operation;
  for (spec.rank = 0; spec.rank < spec.world_size; ++spec.rank) operation.schedules.push_back(algorithm.plan(spec));
  const std::vector<Traffic> traffic = simulate(simulator_options(request, spec, placement), {operation});
  for (const Traffic& rank : traffic) result.time_us = std::max(result.time_us, rank.time_us);
  result.is_simulated = true;
  result.link_bytes = bytes_between_nodes(traffic, spec.nodes);
  return result;
}

}  // namespace zeropg

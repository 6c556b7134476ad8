#include "backend/simulator/cost_estimate.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/collectives/schedule/steps.h"
#include "backend/collectives/select/node_shares.h"
#include "backend/collectives/select/registry.h"
#include "backend/simulator/time_simulator.h"

namespace zeropg {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 60;
constexpr int32_t kMostNodesEach = 16;       // that are simulated one by one where others could stand for them
constexpr double kMostStepsAsTheyAre = 1e6;  // of all ranks; of more, long loops are not run to their end
constexpr double kManySteps = 2e6;           // which take seconds, though their loops are short
constexpr int64_t kFewChunks = 8;            // longer than any pipeline within a rank, as
constexpr int64_t kFewestChunks = 4;
constexpr double kMostPlanBytes = 4e8;
constexpr int64_t kMostRounding = 20;  // sizes are rounded by at most this part of themselves

CollectiveSpec spec_of(const EstimateRequest& request) {
  CollectiveSpec spec{.op = request.op,
                      .root = request.root,
                      .element_bytes = request.element_bytes,
                      .bytes = request.bytes,
                      .bank_bytes = request.bank_bytes,
                      .mailbox_bytes = request.mailbox_bytes,
                      .nodes = request.nodes,
                      .racks = request.racks,
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

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("estimate: " + what); }

void check_links(const EstimateRequest& request) {
  const std::vector<double>& of_nodes = request.model.node_bytes_per_us;
  const std::vector<double>& of_uplinks = request.model.uplink_bytes_per_us;
  if (!of_nodes.empty() && of_nodes.size() != request.nodes.size()) {
    refuse(std::to_string(of_nodes.size()) + " link speeds for " + std::to_string(request.nodes.size()) +
           " nodes; give one per node");
  }
  if (!of_uplinks.empty() && of_uplinks.size() != request.racks.size()) {
    refuse(std::to_string(of_uplinks.size()) + " uplink speeds for " + std::to_string(request.racks.size()) +
           " racks; give one per rack");
  }
  const auto is_positive = [](double speed) { return speed > 0; };
  if (!is_positive(request.model.bytes_per_us) || !is_positive(request.model.network_bytes_per_us) ||
      !std::all_of(of_nodes.begin(), of_nodes.end(), is_positive) ||
      !std::all_of(of_uplinks.begin(), of_uplinks.end(), is_positive)) {
    refuse("a speed is not positive");
  }
  if (!request.racks.empty()) rack_of_nodes(spec_of(request));
}

void check(const EstimateRequest& request, const CollectiveSpec& spec) {
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
  check_links(request);
}

LinkSpeeds link_speeds(const EstimateRequest& request) {
  LinkSpeeds speeds{.latency_us = request.model.hop_us,
                    .of_nodes = request.model.node_bytes_per_us,
                    .of_uplinks = request.model.uplink_bytes_per_us};
  if (speeds.of_nodes.empty()) speeds.of_nodes.assign(request.nodes.size(), request.model.network_bytes_per_us);
  if (!speeds.of_uplinks.empty()) speeds.rack_of_nodes = rack_of_nodes(spec_of(request));
  return speeds;
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

// Which nodes are simulated, and for which others each of them stands: itself alone, or, where plans are the same from
// every node on, all nodes with links as fast as its own.
struct Representation {
  std::vector<int32_t> nodes{};
  std::vector<int32_t> stands_for{};  // by node: a place in `nodes`
};

Schedule plan_of(const Algorithm& algorithm, CollectiveSpec& spec, int32_t rank) {
  spec.rank = rank;
  return algorithm.plan(spec);
}

// As if the last chunk were as long as the others: it may have bytes for some nodes only.
Schedule with_whole_chunks(Schedule schedule) {
  size_t begin = 0;
  for (size_t loop = 0; loop <= schedule.loop_ends.size(); ++loop) {
    const size_t end = loop < schedule.loop_ends.size() ? schedule.loop_ends[loop] : schedule.steps.size();
    const int64_t most = most_chunks(schedule, begin, end);
    for (; begin < end; ++begin) {
      Step& step = schedule.steps[begin];
      if (step.kind != StepKind::kBarrier && step.chunks > 1) step.chunks = std::max(step.chunks, most);
      step.last_bytes = step.bytes;
    }
  }
  return schedule;
}

// Whether the first ranks of node 0 and another one have the same plans but for whom they talk to, who are at the same
// distance.
bool is_same_from(int32_t node, const NodeRings& rings, const Algorithm& algorithm, CollectiveSpec& spec,
                  const Placement& placement) {
  const Schedule first = with_whole_chunks(plan_of(algorithm, spec, placement.rank_at(0, 0)));
  const Schedule other = with_whole_chunks(plan_of(algorithm, spec, placement.rank_at(node, 0)));
  const auto is_alike = [&](const Step& a, const Step& b) {
    if (a.kind != b.kind || a.bytes != b.bytes || a.chunks != b.chunks || a.lag != b.lag ||
        (a.peer < 0) != (b.peer < 0)) {
      return false;
    }
    return a.peer < 0 || (placement.local_rank_of(a.peer) == placement.local_rank_of(b.peer) &&
                          rings.at(placement.node_of(a.peer), rings.distance(0, node)) == placement.node_of(b.peer));
  };
  return std::equal(first.steps.begin(), first.steps.end(), other.steps.begin(), other.steps.end(), is_alike);
}

// Half way round, plans by powers of two look the same; next door they do not.
bool is_same_from_every_node(const NodeRings& rings, const Algorithm& algorithm, CollectiveSpec& spec,
                             const Placement& placement) {
  for (int32_t node = 0; node < rings.nodes; ++node) {
    if (placement.node_size(node) != placement.node_size(0)) return false;
  }
  const auto is_same = [&](int32_t node) { return is_same_from(node, rings, algorithm, spec, placement); };
  return is_same(1) && is_same(rings.nodes / 2) && is_same(rings.ring_size % rings.nodes);
}

// Of racks of one size whose nodes follow each other; 0: they are others.
int32_t ring_size_of_racks(const CollectiveSpec& spec) {
  int32_t next = 0;
  for (const std::vector<int32_t>& rack : spec.racks) {
    if (rack.size() != spec.racks[0].size()) return 0;
    for (const int32_t node : rack) {
      if (node != next++) return 0;
    }
  }
  return spec.racks.empty() ? 0 : static_cast<int32_t>(spec.racks[0].size());
}

// In which rings plans are the same from every node on; 0: in none.
int32_t ring_size_of_plans(const Algorithm& algorithm, CollectiveSpec& spec, const Placement& placement) {
  const int32_t nodes = placement.node_count();
  for (const int32_t size : {nodes, ring_size_of_racks(spec)}) {
    if (size > 1 && is_same_from_every_node({nodes, size}, algorithm, spec, placement)) return size;
  }
  return 0;
}

Representation represent(const LinkSpeeds& links, const Placement& placement, bool is_same) {
  Representation result;
  std::map<std::pair<double, double>, int32_t> by_speed;
  for (int32_t node = 0; node < placement.node_count(); ++node) {
    const std::pair speed{links.of_nodes[node], links.part_of_uplink(node)};
    const auto next = static_cast<int32_t>(result.nodes.size());
    const int32_t place = is_same ? by_speed.try_emplace(speed, next).first->second : next;
    if (place == next) result.nodes.push_back(node);
    result.stands_for.push_back(place);
  }
  return result;
}

// What a group runs, on the nodes that are simulated; none of them where their plans are too large.
TimedGroup timed_group(const EstimateRequest& request, const Algorithm& algorithm, CollectiveSpec spec,
                       const Placement& placement) {
  const int32_t ring_size =
      placement.node_count() > kMostNodesEach ? ring_size_of_plans(algorithm, spec, placement) : 0;
  const bool is_same = ring_size > 0;
  const auto root_bytes = static_cast<double>(memory_bytes(plan_of(algorithm, spec, spec.root)));
  const int32_t other_than_root = (spec.root + spec.world_size / 2) % spec.world_size;
  const auto bytes = static_cast<double>(memory_bytes(plan_of(algorithm, spec, other_than_root)));
  if (!is_same && root_bytes + bytes * (spec.world_size - 1) > kMostPlanBytes) return {};
  const LinkSpeeds links = link_speeds(request);
  Representation represented = represent(links, placement, is_same);
  TimedGroup group{.nodes = request.nodes,
                   .stands_for = std::move(represented.stands_for),
                   .ring_size = ring_size,
                   .links = links,
                   .model = request.model};
  for (const int32_t node : represented.nodes) {
    group.timed.push_back({.node = node});
    for (const int32_t rank : group.nodes[node]) {
      Schedule plan = plan_of(algorithm, spec, rank);
      group.timed.back().schedules.push_back(is_same ? with_whole_chunks(std::move(plan)) : std::move(plan));
    }
  }
  return group;
}

// A little more bytes, or as many, that all ranks of nodes of one size divide into whole cache lines.
CollectiveSpec with_equal_parts(CollectiveSpec spec) {
  const int64_t lines = int64_t{spec.world_size} * kCacheLineBytes;
  if (spec.bytes >= kMostRounding * lines) spec.bytes = part_count(spec.bytes, lines) * lines;
  return spec;
}

double steps_of(const TimedGroup& group) {
  double steps = 0;
  for (const TimedNode& node : group.timed) {
    for (const Schedule& schedule : node.schedules) steps += steps_to_run(schedule);
  }
  return steps;
}

void shorten(TimedGroup& group, int64_t chunks) {
  for (TimedNode& node : group.timed) {
    for (Schedule& schedule : node.schedules) schedule = shortened(schedule, chunks);
  }
}

// Long loops are not run to their end: once the pipeline is full each further chunk takes as long as the one before.
double time_of(TimedGroup group) {
  const double steps = steps_of(group);
  if (steps <= kMostStepsAsTheyAre) return simulate_time(group);
  shorten(group, 2 * kFewChunks);
  const int64_t few = steps_of(group) > kManySteps ? kFewestChunks : kFewChunks;
  shorten(group, 2 * few);
  const double more_us = simulate_time(group);
  const double more_steps = steps_of(group);
  if (more_steps == steps) return more_us;
  shorten(group, few);
  const double us_per_step = (more_us - simulate_time(group)) / (more_steps - steps_of(group));
  return more_us + us_per_step * (steps - more_steps);
}

// From each node to each other one; nodes that are not simulated send what those that stand for them do.
std::vector<std::vector<int64_t>> link_bytes_of(const TimedGroup& group, const Placement& placement) {
  const int32_t nodes = placement.node_count();
  const NodeRings rings = group.rings();
  std::vector<std::vector<int64_t>> by_distance(group.timed.size(), std::vector<int64_t>(nodes));
  for (size_t i = 0; i < group.timed.size(); ++i) {
    for (const Schedule& schedule : group.timed[i].schedules) {
      for (const Step& step : schedule.steps) {
        if (step.kind != StepKind::kSend) continue;
        by_distance[i][rings.distance(group.timed[i].node, placement.node_of(step.peer))] += total_bytes(step);
      }
    }
  }
  std::vector<std::vector<int64_t>> bytes(nodes, std::vector<int64_t>(nodes));
  for (int32_t from = 0; from < nodes; ++from) {
    for (int32_t distance = 1; distance < nodes; ++distance) {
      bytes[from][rings.at(from, distance)] = by_distance[group.stands_for[from]][distance];
    }
  }
  return bytes;
}

}  // namespace

Estimate estimate(const EstimateRequest& request) {
  CollectiveSpec spec = spec_of(request);
  check(request, spec);
  spec.node_shares = node_shares(request.model, spec.nodes);
  const Placement placement(spec);
  const Algorithm& algorithm = algorithm_of(request, spec);
  Estimate result{.algorithm = std::string(algorithm.name), .link_bytes = {}};
  result.is_chosen = &select_algorithm(spec, {}, request.model) == &algorithm;
  TimedGroup group = timed_group(request, algorithm, spec, placement);
  if (group.timed.empty()) group = timed_group(request, algorithm, with_equal_parts(spec), placement);
  if (group.timed.empty()) {
    result.time_us = estimate_us(algorithm.cost(spec), request.model);
    return result;
  }
  result.is_simulated = true;
  result.link_bytes = link_bytes_of(group, placement);
  result.time_us = time_of(std::move(group));
  return result;
}

}  // namespace zeropg

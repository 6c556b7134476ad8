#include "backend/collectives/select/select.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backend/collectives/schedule/placement.h"

namespace zeropg {

namespace {

std::string known_names() {
  std::string names;
  for (const Algorithm& algorithm : algorithms()) {
    if (!names.empty()) names += ", ";
    names += algorithm.name;
  }
  return names;
}

[[noreturn]] void throw_unsupported(std::string_view who, const CollectiveSpec& spec) {
  throw std::invalid_argument(
      std::string(who) + " does not support world_size " + std::to_string(spec.world_size) + " on " +
      std::to_string(node_count(spec)) + " nodes and " + std::to_string(std::max<size_t>(1, spec.domains.size())) +
      " domains with staging banks of " + std::to_string(spec.bank_bytes) + " bytes, mailboxes of " +
      std::to_string(spec.mailbox_bytes) + " bytes, windows between nodes of " + std::to_string(spec.window_bytes) +
      " bytes and elements of " + std::to_string(spec.element_bytes) + " bytes" +
      (spec.codec == nullptr ? "" : ", compressed by " + spec.codec->description()) +
      "; an algorithm may need larger buffers, several nodes, domains or racks, or other dtypes: force another one, or "
      "none");
}

// Of the link that takes longest. Where a cost says nothing of each link, all may be as busy as the busiest one.
double links_us(const Cost& cost, const CostModel& model) {
  const auto& nodes = cost.links.of_nodes;
  double longest = model.node_bytes_per_us.empty() ? cost.network_bytes / model.network_bytes_per_us : 0;
  for (size_t node = 0; node < model.node_bytes_per_us.size(); ++node) {
    longest = std::max(longest, (nodes.empty() ? cost.network_bytes : nodes[node]) / model.node_bytes_per_us[node]);
  }
  const auto& uplinks = cost.links.of_uplinks;
  for (size_t rack = 0; rack < std::min(uplinks.size(), model.uplink_bytes_per_us.size()); ++rack) {
    longest = std::max(longest, uplinks[rack] / model.uplink_bytes_per_us[rack]);
  }
  return longest;
}

// nullptr: none supports `spec`.
const Algorithm* cheapest(const CollectiveSpec& spec, const CostModel& model, bool with_own_order) {
  const Algorithm* best = nullptr;
  double best_us = 0;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.op != spec.op || algorithm.is_direct || !algorithm.supports(spec)) continue;
    if (algorithm.has_own_order && !with_own_order) continue;
    // A group of one rank has no staging that a cost could be computed from, and every plan is the same copy.
    const double us = spec.world_size == 1 ? 0 : estimate_us(algorithm.cost(spec), model);
    if (best == nullptr || us < best_us) {
      best = &algorithm;
      best_us = us;
    }
  }
  return best;
}

}  // namespace

double estimate_us(const Cost& cost, const CostModel& model) {
  // A link carries one message while the processor works on the next, unless that waits for it.
  const double messages_us = cost.messages * model.message_us / 2;
  const double network_us =
      cost.is_in_line ? links_us(cost, model) + messages_us : std::max(links_us(cost, model), messages_us);
  return cost.barriers * model.barrier_us + cost.memory_bytes / model.bytes_per_us +
         cost.far_bytes / model.far_bytes_per_us + cost.network_hops * model.hop_us + network_us;
}

const Algorithm& select_algorithm(const CollectiveSpec& spec, std::string_view forced, const CostModel& model) {
  if (!forced.empty()) {
    const Algorithm* wanted = find_algorithm(forced);
    if (wanted == nullptr) {
      throw std::invalid_argument("unknown collective algorithm '" + std::string(forced) + "', expected one of " +
                                  known_names() + "; correct the name or leave it empty");
    }
    // What is forced is forced for bytes as they are; a codec has algorithms of its own.
    if (wanted->op == spec.op && !wanted->is_direct && (spec.codec == nullptr || wanted->supports(spec))) {
      if (!wanted->supports(spec)) throw_unsupported(wanted->name, spec);
      return *wanted;
    }
  }
  CostModel nominal = model;
  nominal.network_bytes_per_us = CostModel{}.network_bytes_per_us;
  nominal.node_bytes_per_us.clear();
  nominal.uplink_bytes_per_us.clear();
  const Algorithm* best = cheapest(spec, nominal, true);
  if (best != nullptr && !best->has_own_order) best = cheapest(spec, model, false);
  if (best == nullptr) throw_unsupported(traits_of(spec.op).name, spec);
  return *best;
}

const Algorithm* select_direct_algorithm(const CollectiveSpec& spec, std::string_view forced, const CostModel& model) {
  if (spec.world_size == 1) return nullptr;
  for (const Algorithm& direct : algorithms()) {
    if (direct.op != spec.op || !direct.is_direct || !direct.supports(spec)) continue;
    if (!direct.beside.empty() && select_algorithm(spec, forced, model).name != direct.beside) continue;
    if (forced == direct.name) return &direct;
    const Algorithm* wanted = forced.empty() ? nullptr : find_algorithm(forced);
    if (wanted != nullptr && wanted->op == spec.op) return nullptr;
    const Algorithm& other = select_algorithm(spec, {}, model);
    return estimate_us(direct.cost(spec), model) < estimate_us(other.cost(spec), model) ? &direct : nullptr;
  }
  return nullptr;
}

}  // namespace zeropg

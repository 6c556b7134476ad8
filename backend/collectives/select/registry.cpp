#include "backend/collectives/select/registry.h"

#include "backend/collectives/phases/domain_phases.h"
#include "backend/collectives/schedule/direct.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

bool has_one_node(const CollectiveSpec& spec) { return is_one_node(spec); }
bool has_many_nodes(const CollectiveSpec& spec) { return !is_one_node(spec) && spec.window_bytes > 0; }
bool has_mailboxes(const CollectiveSpec& spec) {
  if (spec.world_size == 1) return true;
  return spec.mailbox_bytes > 0 && (is_one_node(spec) || spec.window_bytes > 0);
}
// Staging banks that hold an element of the own tensor, or one for each peer. No codec, which would not be used.
bool has_bank(const CollectiveSpec& spec) {
  return spec.codec == nullptr && (spec.world_size == 1 || (is_one_node(spec) && can_cut_chunk(spec, 1)));
}
bool has_wide_bank(const CollectiveSpec& spec) {
  return spec.codec == nullptr && (spec.world_size == 1 || (is_one_node(spec) && can_cut_chunk(spec, spec.world_size)));
}
bool has_bank_or_window(const CollectiveSpec& spec) {
  return spec.world_size == 1 ||
         (can_cut_chunk(spec, largest_node_size(spec)) && (is_one_node(spec) || spec.window_bytes > 0));
}

constexpr Algorithm kAlgorithms[] = {
    {"all_reduce_one_shot", OpKind::kAllReduce, plan_all_reduce_one_shot, has_bank, cost_all_reduce_one_shot},
    {"all_reduce_staged", OpKind::kAllReduce, plan_all_reduce_staged, has_wide_bank, cost_all_reduce_staged},
    {"all_reduce_domains", OpKind::kAllReduce, plan_all_reduce_domains, can_use_domains, cost_all_reduce_domains},
    {"all_reduce_hierarchical", OpKind::kAllReduce, plan_all_reduce_hierarchical, supports_all_reduce_hierarchical,
     cost_all_reduce_hierarchical, false, false, true},
    {"all_reduce_hierarchical_one_shot", OpKind::kAllReduce, plan_all_reduce_hierarchical_one_shot,
     supports_all_reduce_hierarchical_one_shot, cost_all_reduce_hierarchical_one_shot},
    {"all_reduce_doubling", OpKind::kAllReduce, plan_all_reduce_doubling, supports_all_reduce_doubling,
     cost_all_reduce_doubling, false, true},
    {"all_reduce_halving", OpKind::kAllReduce, plan_all_reduce_halving, supports_all_reduce_halving,
     cost_all_reduce_halving, false, true},
    {"all_reduce_racks", OpKind::kAllReduce, plan_all_reduce_racks, supports_all_reduce_racks, cost_all_reduce_racks},
    {"reduce_staged", OpKind::kReduce, plan_reduce_staged, has_bank, cost_reduce_staged},
    {"reduce_hierarchical", OpKind::kReduce, plan_reduce_hierarchical, supports_all_reduce_hierarchical,
     cost_reduce_hierarchical, false, false, true},
    {"reduce_scatter_staged", OpKind::kReduceScatter, plan_reduce_scatter_staged, has_wide_bank,
     cost_reduce_scatter_staged},
    {"reduce_scatter_domains", OpKind::kReduceScatter, plan_reduce_scatter_domains, can_use_domains,
     cost_reduce_scatter_domains},
    {"reduce_scatter_hierarchical", OpKind::kReduceScatter, plan_reduce_scatter_hierarchical,
     supports_reduce_scatter_hierarchical, cost_reduce_scatter_hierarchical},
    {"reduce_scatter_racks", OpKind::kReduceScatter, plan_reduce_scatter_racks, supports_reduce_scatter_racks,
     cost_reduce_scatter_racks},
    {"all_reduce_compressed", OpKind::kAllReduce, plan_all_reduce_compressed, supports_compressed_exchange,
     cost_all_reduce_compressed},
    {"reduce_scatter_compressed", OpKind::kReduceScatter, plan_reduce_scatter_compressed, supports_compressed_exchange,
     cost_reduce_scatter_compressed},
    {"all_gather_compressed", OpKind::kAllGather, plan_all_gather_compressed, supports_compressed_exchange,
     cost_all_gather_compressed},
    {"all_gather_staged", OpKind::kAllGather, plan_all_gather_staged, has_bank, cost_all_gather_staged},
    {"all_gather_domains", OpKind::kAllGather, plan_all_gather_domains, can_use_domains, cost_all_gather_domains},
    {"all_gather_hierarchical", OpKind::kAllGather, plan_all_gather_hierarchical, supports_all_gather_hierarchical,
     cost_all_gather_hierarchical},
    {"all_gather_racks", OpKind::kAllGather, plan_all_gather_racks, supports_all_gather_racks, cost_all_gather_racks},
    {"gather_staged", OpKind::kGather, plan_gather_staged, has_bank_or_window, cost_gather_staged},
    {"scatter_staged", OpKind::kScatter, plan_scatter_staged, has_bank_or_window, cost_scatter_staged},
    {"broadcast_staged", OpKind::kBroadcast, plan_broadcast_staged, has_bank, cost_broadcast_staged},
    {"broadcast_domains", OpKind::kBroadcast, plan_broadcast_domains, can_use_domains, cost_broadcast_domains},
    {"broadcast_tree", OpKind::kBroadcast, plan_broadcast_tree, supports_broadcast_nodes, cost_broadcast_tree},
    {"broadcast_chain", OpKind::kBroadcast, plan_broadcast_chain, supports_broadcast_nodes, cost_broadcast_chain},
    {"all_to_all_pairwise", OpKind::kAllToAll, plan_all_to_all_pairwise, has_mailboxes, cost_all_to_all_pairwise},
    {"all_reduce_direct", OpKind::kAllReduce, plan_all_reduce_direct, can_be_direct, cost_all_reduce_direct, true},
    {"reduce_scatter_direct", OpKind::kReduceScatter, plan_reduce_scatter_direct, can_be_direct,
     cost_reduce_scatter_direct, true},
    {"all_gather_direct", OpKind::kAllGather, plan_all_gather_direct, can_be_direct, cost_all_gather_direct, true},
    {"all_gather_per_node", OpKind::kAllGather, plan_all_gather_per_node, supports_all_gather_per_node,
     cost_all_gather_per_node, true, false, false, "all_gather_hierarchical"},
    {"all_gather_racks_per_node", OpKind::kAllGather, plan_all_gather_racks_per_node,
     supports_all_gather_racks_per_node, cost_all_gather_racks_per_node, true, false, false, "all_gather_racks"},
    {"broadcast_direct", OpKind::kBroadcast, plan_broadcast_direct, can_be_direct, cost_broadcast_direct, true},
    {"all_to_all_direct", OpKind::kAllToAll, plan_all_to_all_direct, can_be_direct, cost_all_to_all_direct, true},
    {"barrier", OpKind::kBarrier, plan_barrier, has_one_node, cost_barrier},
    {"barrier_dissemination", OpKind::kBarrier, plan_barrier_dissemination, has_many_nodes, cost_barrier_dissemination},
};

}  // namespace

std::span<const Algorithm> algorithms() { return kAlgorithms; }

const Algorithm* find_algorithm(std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

}  // namespace zeropg

#include "backend/collectives/registry.h"

#include "backend/collectives/steps.h"

namespace zeropg {

namespace {

bool always(const CollectiveSpec&) { return true; }
bool has_mailboxes(const CollectiveSpec& spec) { return spec.world_size == 1 || spec.mailbox_bytes > 0; }
// Staging banks that hold an element of the own tensor, or one for each peer.
bool has_bank(const CollectiveSpec& spec) { return spec.world_size == 1 || can_cut_chunk(spec, 1); }
bool has_wide_bank(const CollectiveSpec& spec) { return spec.world_size == 1 || can_cut_chunk(spec, spec.world_size); }

constexpr Algorithm kAlgorithms[] = {
    {"all_reduce_one_shot", OpKind::kAllReduce, plan_all_reduce_one_shot, has_bank, cost_all_reduce_one_shot},
    {"all_reduce_staged", OpKind::kAllReduce, plan_all_reduce_staged, has_wide_bank, cost_all_reduce_staged},
    {"reduce_staged", OpKind::kReduce, plan_reduce_staged, has_bank, cost_reduce_staged},
    {"reduce_scatter_staged", OpKind::kReduceScatter, plan_reduce_scatter_staged, has_wide_bank,
     cost_reduce_scatter_staged},
    {"all_gather_staged", OpKind::kAllGather, plan_all_gather_staged, has_bank, cost_all_gather_staged},
    {"gather_staged", OpKind::kGather, plan_gather_staged, has_bank, cost_gather_staged},
    {"scatter_staged", OpKind::kScatter, plan_scatter_staged, has_wide_bank, cost_scatter_staged},
    {"broadcast_staged", OpKind::kBroadcast, plan_broadcast_staged, has_bank, cost_broadcast_staged},
    {"all_to_all_pairwise", OpKind::kAllToAll, plan_all_to_all_pairwise, has_mailboxes, cost_all_to_all_pairwise},
    {"barrier", OpKind::kBarrier, plan_barrier, always, cost_barrier},
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

#include "backend/collectives/schedule/collective_spec.h"

namespace zeropg {

const char* op_name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

bool is_reducing(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

bool announces_blocks(const CollectiveSpec& spec) {
  return spec.op == OpKind::kAllToAll && spec.world_size <= kMostAnnouncedBlocks;
}

}  // namespace zeropg

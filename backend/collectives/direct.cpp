#include "backend/collectives/direct.h"

#include "backend/collectives/placement.h"

namespace zeropg {

SharedTensors shared_tensors(const CollectiveSpec& spec, int32_t rank) {
  switch (spec.op) {
    case OpKind::kAllReduce:
      return {.input = true, .output = true};
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
    case OpKind::kAllToAll:
      return {.input = true};
    case OpKind::kBroadcast:
      return {.input = rank == spec.root};
    case OpKind::kReduce:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kBarrier:
      break;
  }
  return {};
}

int64_t shared_input_bytes(const CollectiveSpec& spec) {
  return spec.op == OpKind::kReduceScatter ? spec.world_size * spec.bytes : spec.bytes;
}

bool can_be_direct(const CollectiveSpec& spec) {
  return spec.codec == nullptr && is_one_node(spec) && !spec.input_is_list;
}

}  // namespace zeropg

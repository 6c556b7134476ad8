#include "backend/engine/collective_context.h"

namespace zeropg {

namespace {

std::vector<Transport*> transports_of(GroupContext& group) {
  std::vector<Transport*> transports;
  for (int32_t peer = 0; peer < group.world_size(); ++peer) {
    transports.push_back(&group.transport_to(peer));
  }
  return transports;
}

}  // namespace

CollectiveContext::CollectiveContext(GroupContext& group)
    : topology(group.topology()),
      arena(group.arena()),
      pool(*group.pool()),
      peers(group.peers()),
      statistics(group.statistics()),
      network(group.network()),
      transports(transports_of(group)),
      cma_peers(static_cast<int32_t>(topology.own_node().size())) {
  for (size_t place = 0; place < topology.own_node().size(); ++place) {
    for (const int32_t bank : {0, 1}) {
      staging_.push_back(arena.staging(static_cast<int32_t>(place), bank));
    }
  }
}

std::byte* CollectiveContext::scratch(int64_t bytes) {
  constexpr size_t kAlignment = 64;
  const size_t needed = static_cast<size_t>(bytes) + kAlignment;
  if (scratch_.size() < needed) {
    scratch_ = std::vector<std::byte>(needed);
  }
  const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
  return scratch_.data() + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace zeropg

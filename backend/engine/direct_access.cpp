#include "backend/engine/direct_access.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>

#include "backend/collectives/schedule/direct.h"
#include "backend/group/failure.h"
#include "backend/transport/rank_state.h"
#include "backend/transport/shm/node_output.h"

namespace zeropg {

DirectAccess::DirectAccess(CollectiveContext& context, const PlannedCollective& collective, const OperationLabel& label)
    : context_(context), collective_(collective), label_(label) {
  const SharedTensors shared = shared_tensors(collective.spec, collective.spec.rank);
  const bool expects_direct = offers_pool() || (offers_reading() && context.cma_peers.reads_all());
  begins_direct_ = expects_direct && (shared.input || shared.output);
}

// Where the blocks of an all-to-all begin is known from what ranks announce of them.
bool DirectAccess::offers_pool() const {
  const CollectiveSpec& spec = collective_.spec;
  return collective_.offers_direct && (!traits_of(spec.op).has_counts || announces_blocks(spec));
}

bool DirectAccess::offers_reading() const { return collective_.offers_reading && announces_blocks(collective_.spec); }

void DirectAccess::offer(DirectOffer& mine) const {
  mine.begins_direct = begins_direct_ ? 1 : 0;
  mine.offers_direct = offers_pool() || offers_reading() ? 1 : 0;
  mine.pool_input = collective_.pool_input;
  mine.pool_output = collective_.pool_output;
  mine.input_address = 0;
  if (offers_reading()) {
    constexpr uint64_t kNoBytes = 1;
    const auto input = reinterpret_cast<uint64_t>(collective_.inputs.at(0));
    mine.input_address = input != 0 ? input : kNoBytes;
    mine.owner = own_cma_identity();
  }
  mine.reads_peers = context_.cma_peers.reads_all() ? 1 : 0;
}

DirectAccess::Decision DirectAccess::decide(const NodeFingerprints& announcements) {
  bool offer_all = true;
  bool must_read = false;
  bool can_read = true;
  bool begins_any = false;
  for (const int32_t peer : context_.topology.own_node()) {
    const DirectOffer& said = announcements.of(peer).direct;
    offer_all = offer_all && said.offers_direct != 0;
    begins_any = begins_any || said.begins_direct != 0;
    can_read = can_read && said.reads_peers != 0;
    if (said.input_address != 0) {
      must_read = true;
      if (collective_.may_read && peer != context_.topology.rank) {
        meet(peer, said.owner);
      }
    }
  }
  if (!offer_all || (must_read && !can_read)) {
    if (collective_.node_output != nullptr) {
      collective_.node_output->decline();
    }
    return {.is_direct = false, .must_restart = begins_any};
  }
  locate(announcements);
  if (collective_.node_output != nullptr) {
    collective_.node_output->hold(outputs_[first_of_node(collective_.spec, collective_.spec.rank)]);
  }
  return {.is_direct = true, .must_restart = false};
}

void DirectAccess::meet(int32_t peer, const CmaIdentity& identity) {
  const std::string& refusal = context_.cma_peers.meet(context_.topology.local_rank[peer], identity);
  if (!refusal.empty()) {
    say_unreadable(context_.topology.rank, context_.topology.world_size(), peer, refusal);
  }
}

void DirectAccess::locate(const NodeFingerprints& announcements) {
  const CollectiveSpec& spec = collective_.spec;
  inputs_.assign(static_cast<size_t>(spec.world_size), nullptr);
  outputs_.assign(static_cast<size_t>(spec.world_size), nullptr);
  addresses_.assign(static_cast<size_t>(spec.world_size), 0);
  for (const int32_t peer : context_.topology.own_node()) {
    const Announcement& said = announcements.of(peer);
    const SharedTensors shared = shared_tensors(spec, peer);
    if (shared.input) {
      locate_input(peer, said);
    }
    if (shared.output) {
      outputs_[peer] = in_pool_of(peer, said.direct.pool_output, shared_output_bytes(spec));
    }
  }
}

void DirectAccess::locate_input(int32_t peer, const Announcement& said) {
  const CollectiveSpec& spec = collective_.spec;
  uint64_t offset = 0;
  int64_t bytes = shared_input_bytes(spec);
  if (traits_of(spec.op).has_counts) {
    const AnnouncedBlocks blocks = said.blocks();
    offset = std::accumulate(blocks.sent, blocks.sent + spec.rank, uint64_t{0});
    bytes = spec.receive_bytes[peer];
  }
  if (said.direct.input_address != 0) {
    addresses_[peer] = said.direct.input_address + offset;
  } else {
    const auto first = static_cast<int64_t>(static_cast<uint64_t>(said.direct.pool_input) + offset);
    inputs_[peer] = in_pool_of(peer, first, bytes);
  }
}

std::byte* DirectAccess::in_pool_of(int32_t rank, int64_t offset, int64_t bytes) const {
  std::byte* data = context_.pool.at(context_.topology.local_rank[rank], offset, bytes);
  if (data == nullptr) {
    fail_operation(label_, "rank ", rank, " says that ", bytes, " bytes of its tensor begin at ", offset,
                   " of its part of the tensor pool, which has ", context_.pool.bytes_per_rank(),
                   "; its memory is damaged: restart from a checkpoint.");
  }
  return data;
}

// The peer waits at the last barrier, so what was read from it was there, or nobody passes that barrier.
void DirectAccess::read(int32_t peer, int64_t offset, std::span<std::byte> into) {
  CmaPeers& memory = context_.cma_peers;
  const uint64_t from = addresses_[peer] + static_cast<uint64_t>(offset);
  for (size_t done = 0; done < into.size(); done += kCheckBytes) {
    check();
    const auto piece = into.subspan(done, std::min<size_t>(kCheckBytes, into.size() - done));
    const std::string refusal = memory.read(context_.topology.local_rank[peer], from + done, piece);
    if (refusal.empty()) {
      continue;
    }
    check();
    throw_if_lost(label_, context_.peers.states(), {peer});
    if (memory.is_gone(context_.topology.local_rank[peer])) {
      PeerStates gone;
      gone.dead = {peer};
      throw_if_lost(label_, gone, {peer});
    }
    fail_operation(label_, "this rank could read the memory of rank ", peer, " and now cannot any more (", refusal,
                   "); BackendOptions(cma=False) on every rank copies through shared memory instead.");
  }
}

void DirectAccess::check() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read comes before this look
  for (const int32_t peer : context_.topology.own_node()) {
    const RankState state = context_.arena.state_of(context_.topology.local_rank[peer]);
    TORCH_CHECK_WITH(DistNetworkError, state == RankState::kAlive, "rank ", peer,
                     " gave up while others worked on its tensor");
  }
}

}  // namespace zeropg

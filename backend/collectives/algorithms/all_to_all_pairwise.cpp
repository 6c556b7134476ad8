// All-to-all through staging and mailboxes. What a staging slot can take of each block goes through it, before and
// after the barrier that the announcement needs anyway: small blocks cost no other meeting. The rest goes over
// mailboxes, as all blocks between nodes do: at distance d a rank sends to rank + d and receives from rank - d, piece
// by piece in turn.
//
// That cannot deadlock, whatever the counts: order the steps of all ranks by (distance, piece, send before receive). A
// receive waits for the send of the same distance and piece, a send for the receive of an earlier piece of the same
// pair: always for something earlier in that order. Pieces are half a mailbox, or half a window between nodes, so that
// one is written while one is read.
#include <algorithm>
#include <numeric>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/all_to_all_blocks.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

// Of the block for each other rank of the node; 0 where a bank is too small to be cut, or counts are compared in front
// of bytes only: then all of them go that way.
int64_t staged_bytes_per_block(const CollectiveSpec& spec, const Placement& placement) {
  const auto peers = static_cast<int32_t>(placement.local_ranks().size()) - 1;
  const bool can_stage = peers > 0 && announces_blocks(spec) && can_cut_chunk(spec, peers);
  return can_stage ? cut_chunk(spec, peers).bytes : 0;
}

}  // namespace

Schedule plan_all_to_all_pairwise(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_to_all_pairwise";
  const auto [sources, destinations] = all_to_all_blocks(spec);
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Placement placement(spec);
  const auto is_near = [&](int32_t peer) { return placement.node_of(peer) == placement.node(); };
  const int64_t staged_bytes = staged_bytes_per_block(spec, placement);
  const auto staged_for = [&](int32_t owner, int32_t peer) {
    const int32_t piece = piece_for_peer(placement.local_rank_of(owner), placement.local_rank_of(peer));
    return staging(owner, 0, piece * staged_bytes);
  };
  // A bank each, whatever the counts: ranks of one node use as many.
  Schedule schedule = make_schedule(kName, 1);
  for (const int32_t peer : placement.local_ranks()) {
    if (peer == spec.rank) continue;
    add_copy(schedule, staged_for(spec.rank, peer), sources[peer], std::min(staged_bytes, spec.send_bytes[peer]));
  }
  add_barrier(schedule);
  for (const int32_t peer : placement.local_ranks()) {
    if (peer == spec.rank) {
      add_copy(schedule, destinations[peer], sources[peer], spec.send_bytes[peer]);
    } else {
      add_copy(schedule, destinations[peer], staged_for(peer, spec.rank),
               std::min(staged_bytes, spec.receive_bytes[peer]));
    }
  }
  // What is left of a block of so many bytes.
  const auto rest_of = [&](int32_t peer, int64_t bytes) {
    const int64_t begin = is_near(peer) ? std::min(staged_bytes, bytes) : 0;
    return Range{begin, bytes - begin};
  };
  const auto piece_bytes = [&](int32_t peer) {
    return std::max<int64_t>(1, (is_near(peer) ? spec.mailbox_bytes : spec.window_bytes) / 2);
  };
  // Calls and counts are compared by the announcement inside a node, where that holds the counts; otherwise by the
  // header of the first bytes. It goes to everybody before anybody is waited for: a rank that made another call, and
  // sends nothing, would not hear from one that waits for it. And it goes, and is waited for, also where there are no
  // bytes.
  const auto needs_header = [&](int32_t peer) { return !is_near(peer) || !announces_blocks(spec); };
  for (int32_t distance = 1; distance < spec.world_size; ++distance) {
    const int32_t to = (spec.rank + distance) % spec.world_size;
    if (needs_header(to)) schedule.steps.push_back({.kind = StepKind::kSend, .peer = to, .source = sources[to]});
  }
  for (int32_t distance = 1; distance < spec.world_size; ++distance) {
    const int32_t to = (spec.rank + distance) % spec.world_size;
    const int32_t from = (spec.rank - distance + spec.world_size) % spec.world_size;
    const Range to_send = rest_of(to, spec.send_bytes[to]);
    const Range to_receive = rest_of(from, spec.receive_bytes[from]);
    const Chunks sent = chunks_of_size(to_send.bytes, piece_bytes(to));
    const Chunks received = chunks_of_size(to_receive.bytes, piece_bytes(from));
    begin_loop(schedule);
    add_send({schedule, 0, sent.count}, to, with_stride(advance(sources[to], to_send.offset_bytes), sent.bytes), sent);
    add_receive({schedule, 0, received.count}, from,
                with_stride(advance(destinations[from], to_receive.offset_bytes), received.bytes), received);
    if (spec.receive_bytes[from] == 0 && needs_header(from)) {
      begin_loop(schedule);
      schedule.steps.push_back({.kind = StepKind::kReceive, .peer = from, .destination = destinations[from]});
    }
  }
  return schedule;
}

// Counts differ between ranks, which have to choose alike; but the only other choice is the direct algorithm, which
// runs where all ranks chose it and nowhere else. So the rank's own counts may enter here.
Cost cost_all_to_all_pairwise(const CollectiveSpec& spec) {
  const auto sum = [](const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), 0.0);
  };
  return {.barriers = 1, .memory_bytes = 2 * (sum(spec.send_bytes) + sum(spec.receive_bytes))};
}

}  // namespace zeropg

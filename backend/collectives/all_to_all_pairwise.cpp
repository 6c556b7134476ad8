// All-to-all over mailboxes: at distance d a rank sends to rank + d and receives from rank - d, piece by piece in turn.
//
// It cannot deadlock, whatever the counts: order the steps of all ranks by (distance, piece, send before receive). A
// receive waits for the send of the same distance and piece, a send for the receive of an earlier piece of the same
// pair: always for something earlier in that order. Pieces are half a mailbox, or half a window between nodes, so that
// one is written while one is read. The barrier at the start only serves the announcement; no staging is used.
#include <algorithm>
#include <numeric>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/all_to_all_blocks.h"
#include "backend/collectives/placement.h"
#include "backend/collectives/steps.h"

namespace zeropg {

Schedule plan_all_to_all_pairwise(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_to_all_pairwise";
  const auto [sources, destinations] = all_to_all_blocks(spec);
  if (spec.world_size == 1) return plan_alone(kName, spec);
  const Placement placement(spec);
  Schedule schedule = make_schedule(kName, 0);
  // Counts are compared also where one side has none: between nodes by a header, inside one by the announcement.
  const auto has_header = [&](int32_t peer) { return placement.node_of(peer) != placement.node(); };
  add_copy(schedule, destinations[spec.rank], sources[spec.rank], spec.send_bytes[spec.rank]);
  const auto piece_bytes = [&](int32_t peer) {
    const bool is_near = placement.node_of(peer) == placement.node();
    return std::max<int64_t>(1, (is_near ? spec.mailbox_bytes : spec.window_bytes) / 2);
  };
  for (int32_t distance = 1; distance < spec.world_size; ++distance) {
    const int32_t to = (spec.rank + distance) % spec.world_size;
    const int32_t from = (spec.rank - distance + spec.world_size) % spec.world_size;
    if (spec.send_bytes[to] == 0 && has_header(to)) {
      schedule.steps.push_back({.kind = StepKind::kSend, .peer = to, .source = sources[to]});
    }
    const int64_t pieces = std::max(part_count(spec.send_bytes[to], piece_bytes(to)),
                                    part_count(spec.receive_bytes[from], piece_bytes(from)));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const Range sent = part_of(spec.send_bytes[to], piece_bytes(to), piece);
      const Range received = part_of(spec.receive_bytes[from], piece_bytes(from), piece);
      add_send(schedule, to, advance(sources[to], sent.offset_bytes), sent.bytes);
      add_receive(schedule, from, advance(destinations[from], received.offset_bytes), received.bytes);
    }
    if (spec.receive_bytes[from] == 0 && has_header(from)) {
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

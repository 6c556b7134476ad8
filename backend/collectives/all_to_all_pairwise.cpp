// All-to-all over mailboxes: at distance d a rank sends to rank + d and receives from rank - d, piece by piece in turn.
//
// It cannot deadlock, whatever the counts: order the steps of all ranks by (distance, piece, send before receive). A
// receive waits for the send of the same distance and piece, a send for the receive of an earlier piece of the same
// pair: always for something earlier in that order. Pieces are half a mailbox, or half a window between nodes, so that
// one is written while one is read. The barrier at the start only serves the announcement; no staging is used.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "backend/collectives/algorithms.h"
#include "backend/collectives/placement.h"
#include "backend/collectives/steps.h"

namespace zeropg {

namespace {

// First byte of each peer's block in a packed tensor, or of the peer's tensor in a list.
std::vector<Region> block_starts(Space space, bool is_list, const std::vector<int64_t>& block_bytes) {
  std::vector<Region> starts;
  int64_t offset = 0;
  for (size_t peer = 0; peer < block_bytes.size(); ++peer) {
    starts.push_back(
        {.space = space, .index = is_list ? static_cast<int32_t>(peer) : 0, .offset_bytes = is_list ? 0 : offset});
    offset += block_bytes[peer];
  }
  return starts;
}

void check_counts(const CollectiveSpec& spec) {
  const auto world_size = static_cast<size_t>(spec.world_size);
  if (spec.send_bytes.size() != world_size || spec.receive_bytes.size() != world_size) {
    throw std::invalid_argument("all_to_all: " + std::to_string(spec.send_bytes.size()) + " send counts and " +
                                std::to_string(spec.receive_bytes.size()) + " receive counts, expected " +
                                std::to_string(spec.world_size) + " of each; give one per rank");
  }
  if (spec.send_bytes[spec.rank] != spec.receive_bytes[spec.rank]) {
    throw std::invalid_argument("all_to_all: this rank sends " + std::to_string(spec.send_bytes[spec.rank]) +
                                " bytes to itself but receives " + std::to_string(spec.receive_bytes[spec.rank]) +
                                "; make both splits of the own rank equal");
  }
}

}  // namespace

Schedule plan_all_to_all_pairwise(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_to_all_pairwise";
  check_counts(spec);
  if (spec.world_size == 1) return plan_alone(kName, spec);
  Schedule schedule = make_schedule(kName, 0);
  const std::vector<Region> sources = block_starts(Space::kInput, spec.input_is_list, spec.send_bytes);
  const std::vector<Region> destinations = block_starts(Space::kOutput, spec.output_is_list, spec.receive_bytes);
  add_copy(schedule, destinations[spec.rank], sources[spec.rank], spec.send_bytes[spec.rank]);
  const Placement placement(spec);
  const auto piece_bytes = [&](int32_t peer) {
    const bool is_near = placement.node_of(peer) == placement.node();
    return std::max<int64_t>(1, (is_near ? spec.mailbox_bytes : spec.window_bytes) / 2);
  };
  for (int32_t distance = 1; distance < spec.world_size; ++distance) {
    const int32_t to = (spec.rank + distance) % spec.world_size;
    const int32_t from = (spec.rank - distance + spec.world_size) % spec.world_size;
    const int64_t pieces = std::max(part_count(spec.send_bytes[to], piece_bytes(to)),
                                    part_count(spec.receive_bytes[from], piece_bytes(from)));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const Range sent = part_of(spec.send_bytes[to], piece_bytes(to), piece);
      const Range received = part_of(spec.receive_bytes[from], piece_bytes(from), piece);
      add_send(schedule, to, advance(sources[to], sent.offset_bytes), sent.bytes);
      add_receive(schedule, from, advance(destinations[from], received.offset_bytes), received.bytes);
    }
  }
  return schedule;
}

// Counts differ between ranks, so what is moved cannot enter the choice, which all ranks have to make alike.
Cost cost_all_to_all_pairwise(const CollectiveSpec&) { return {.barriers = 1}; }

}  // namespace zeropg

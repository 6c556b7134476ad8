// Runs the schedules of all ranks of a group in one process, with real bytes and no threads.
//
// It proves what a machine can only make likely: which rank runs next is drawn from a seed, so that ranks get ahead of
// each other as far as the schedule lets them; a deadlock, a race on staging memory or on tensors that ranks share, a
// step outside its buffer or into another node's memory, or bytes that nobody receives is an error that says where. It
// counts what every rank moves and estimates the time.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/select/select.h"
#include "backend/simulator/rank_clock.h"
#include "compression/compressor.h"

namespace zeropg {

struct SimulatorOptions {
  int32_t world_size = 1;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;
  uint64_t seed = 0;  // of the interleaving of ranks; results and times do not depend on it
  CostModel model{};  // of barriers, copies, reductions, and of links between nodes where `link` is empty
  std::vector<std::vector<int32_t>> nodes{};  // as in CollectiveSpec; empty: one node
  int64_t window_bytes = 0;                   // as mailbox_bytes, between nodes
  // Empty: within a node a default SimulatedLink, between nodes the model's, shared equally by the ranks of the node.
  // Mailboxes and windows are taken as deep enough not to slow a sender down.
  std::function<SimulatedLink(int32_t from, int32_t to)> link{};
};

// One rank's view of a collective. Outputs may alias inputs as CollectiveSpec allows.
struct SimulatedTensors {
  std::vector<std::span<std::byte>> inputs;
  std::vector<std::span<std::byte>> outputs;
  std::vector<std::span<std::byte>> residuals{};  // by hop; as long as the range of the request
  std::vector<int64_t> blocks_for_peers{};        // all_to_all: where in the packed input each peer's block begins
};

struct SimulatedOperation {
  std::vector<Schedule> schedules{};        // one per rank
  std::vector<SimulatedTensors> tensors{};  // one per rank
  DType dtype = DType::kUInt8;              // of reducing steps, as are the next two
  ReduceOp reduce_op = ReduceOp::kSum;
  std::complex<double> factor = 1;
  const Compressor* codec = nullptr;  // of encoding and decoding steps
};

// What one rank moved in all operations together.
struct Traffic {
  int64_t barriers = 0;
  int64_t copied_bytes = 0;                // by kCopy
  int64_t reduced_bytes = 0;               // sources of reducing steps
  int64_t encoded_bytes = 0;               // of floats, by kEncode
  int64_t memory_bytes = 0;                // read plus written by all steps but messages
  std::vector<int64_t> sent_bytes;         // to each peer, through its mailbox
  std::vector<int64_t> staged_read_bytes;  // from the staging slot of each rank
  double time_us = 0;                      // until this rank was done
};

// The bytes that went from each node to each other one: [from][to].
std::vector<std::vector<int64_t>> bytes_between_nodes(const std::vector<Traffic>& traffic,
                                                      const std::vector<std::vector<int32_t>>& nodes);

// A fault of a schedule; the message names operation, rank and step.
class SimulationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs the operations back to back on one group: no rank waits for another between them but where a schedule says so,
// and staging banks rotate as Note [Banks] in schedule.h demands. Returns the traffic of every rank.
// Throws SimulationError, or std::invalid_argument when an operation does not have one entry per rank.
std::vector<Traffic> simulate(const SimulatorOptions& options, const std::vector<SimulatedOperation>& operations);

}  // namespace zeropg

// The time of one rank on an alpha-beta model of its node and of the links between nodes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/select/select.h"
#include "compression/compressor.h"

namespace zeropg {

// The alpha-beta model of the way from one rank to another. Between nodes a message travels while its sender goes on;
// what one rank sends to other nodes, or receives from them, travels one message after the other.
struct SimulatedLink {
  double latency_us = 1;
  double bytes_per_us = 10'000;
};

struct RankClock {
  double now_us = 0;
  double sending_until_us = 0;  // between nodes, as the next one
  double receiving_until_us = 0;

  void work(int64_t bytes, const CostModel& model) { now_us += static_cast<double>(bytes) / model.bytes_per_us; }

  // Within a node, where the sender copies it. Returns when it has arrived.
  double send_near(const SimulatedLink& link, int64_t bytes) {
    now_us += static_cast<double>(bytes) / link.bytes_per_us;
    return now_us + link.latency_us;
  }
  void receive_near(double arrival_us) { now_us = std::max(now_us, arrival_us); }

  // Between nodes. Returns when it begins to arrive.
  double send_far(const SimulatedLink& link, int64_t bytes, const CostModel& model) {
    now_us += model.message_us / 2;
    const double start_us = std::max(now_us, sending_until_us);
    sending_until_us = start_us + static_cast<double>(bytes) / link.bytes_per_us;
    return start_us + link.latency_us;
  }
  void receive_far(const SimulatedLink& link, double arrival_us, int64_t bytes) {
    receiving_until_us = std::max(receiving_until_us, arrival_us) + static_cast<double>(bytes) / link.bytes_per_us;
    now_us = std::max(now_us, receiving_until_us);
  }
  // What receiving costs the CPU beside, once for each message.
  void take_far(const CostModel& model) { now_us += model.message_us / 2; }
};

// What a step that is no message reads and writes. `codec`: of steps that need one.
int64_t memory_bytes_of(const Step& step, DType dtype, const Compressor* codec);
// How long a message is; where that varies, as long as most are.
int64_t typical_message_bytes(const Step& step, const Compressor* codec);

}  // namespace zeropg

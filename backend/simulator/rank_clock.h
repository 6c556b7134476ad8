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
// what one rank sends, or receives, travels one message after the other.
struct SimulatedLink {
  double latency_us = 1;
  double sender_bytes_per_us = 10'000;
  double receiver_bytes_per_us = 10'000;
};

// One direction of a link, which carries one message after the other.
struct LinkClock {
  double free_us = 0;

  struct Times {
    double begin_us;
    double end_us;
  };
  Times carry(double start_us, int64_t bytes, double bytes_per_us) {
    const double begin_us = std::max(start_us, free_us);
    free_us = begin_us + static_cast<double>(bytes) / bytes_per_us;
    return {begin_us, free_us};
  }
};

struct RankClock {
  double now_us = 0;
  LinkClock sending{};  // between nodes, as the next one
  LinkClock receiving{};

  void work(int64_t bytes, const CostModel& model) { now_us += static_cast<double>(bytes) / model.bytes_per_us; }

  // Within a node, where the sender copies it. Returns when it has arrived.
  double send_near(const SimulatedLink& link, int64_t bytes) {
    now_us += static_cast<double>(bytes) / link.sender_bytes_per_us;
    return now_us + link.latency_us;
  }
  void receive_near(double arrival_us) { now_us = std::max(now_us, arrival_us); }

  // Between nodes. Returns when it begins to arrive.
  double send_far(const SimulatedLink& link, int64_t bytes, const CostModel& model) {
    give_far(model);
    return sending.carry(now_us, bytes, link.sender_bytes_per_us).begin_us + link.latency_us;
  }
  void receive_far(const SimulatedLink& link, double arrival_us, int64_t bytes) {
    const double sent_us = arrival_us + static_cast<double>(bytes) / link.sender_bytes_per_us;
    now_us = std::max({now_us, sent_us, receiving.carry(arrival_us, bytes, link.receiver_bytes_per_us).end_us});
  }
  // What sending and receiving cost the CPU beside, once for each message.
  void give_far(const CostModel& model) { now_us += model.message_us / 2; }
  void take_far(const CostModel& model) { now_us += model.message_us / 2; }
};

// What a step that is no message reads and writes. `codec`: of steps that need one.
int64_t memory_bytes_of(const Step& step, DType dtype, const Compressor* codec);
// How long a message is; where that varies, as long as most are.
int64_t typical_message_bytes(const Step& step, const Compressor* codec);

}  // namespace zeropg

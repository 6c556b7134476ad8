// The time of one rank on an alpha-beta model of its node and of the links between nodes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/select/select.h"
#include "compression/compressor.h"

namespace zeropg {

// What a rank has of the links that it sends or receives through.
struct LinkEnd {
  double bytes_per_us = 10'000;    // its node's
  double uplink_bytes_per_us = 0;  // its rack's; 0: the way stays in the rack
};

// The alpha-beta model of the way from one rank to another. Between nodes a message travels while its sender goes on;
// what one rank sends through a link, or receives, travels one message after the other. A rack's uplink carries some
// while the links of its nodes carry others.
struct SimulatedLink {
  double latency_us = 1;
  LinkEnd sender{};
  LinkEnd receiver{};

  double slowest_bytes_per_us() const {
    double slowest = std::min(sender.bytes_per_us, receiver.bytes_per_us);
    for (const LinkEnd& end : {sender, receiver}) {
      if (end.uplink_bytes_per_us > 0) slowest = std::min(slowest, end.uplink_bytes_per_us);
    }
    return slowest;
  }
};

// When a rank's links are free again, in one direction.
struct LinkClock {
  double node_us = 0;
  double uplink_us = 0;

  struct Times {
    double begin_us;  // on the last of them
    double end_us;    // on all of them
  };
  Times carry(const LinkEnd& end, double start_us, int64_t bytes) {
    const double begin_us = std::max(start_us, node_us);
    node_us = begin_us + static_cast<double>(bytes) / end.bytes_per_us;
    if (end.uplink_bytes_per_us == 0) return {begin_us, node_us};
    const double uplink_begin_us = std::max(begin_us, uplink_us);
    uplink_us = uplink_begin_us + static_cast<double>(bytes) / end.uplink_bytes_per_us;
    return {uplink_begin_us, std::max(node_us, uplink_us)};
  }
};

struct RankClock {
  double now_us = 0;
  LinkClock sending{};  // between nodes, as the next one
  LinkClock receiving{};

  void work(int64_t bytes, const CostModel& model) { now_us += static_cast<double>(bytes) / model.bytes_per_us; }

  // Within a node, where the sender copies it. Returns when it has arrived.
  double send_near(const SimulatedLink& link, int64_t bytes) {
    now_us += static_cast<double>(bytes) / link.sender.bytes_per_us;
    return now_us + link.latency_us;
  }
  void receive_near(double arrival_us) { now_us = std::max(now_us, arrival_us); }

  // Between nodes. Returns when it begins to arrive.
  double send_far(const SimulatedLink& link, int64_t bytes, const CostModel& model) {
    now_us += model.message_us / 2;
    return sending.carry(link.sender, now_us, bytes).begin_us + link.latency_us;
  }
  void receive_far(const SimulatedLink& link, double arrival_us, int64_t bytes) {
    const double sent_us = arrival_us + static_cast<double>(bytes) / link.slowest_bytes_per_us();
    now_us = std::max({now_us, sent_us, receiving.carry(link.receiver, arrival_us, bytes).end_us});
  }
  // What receiving costs the CPU beside, once for each message.
  void take_far(const CostModel& model) { now_us += model.message_us / 2; }
};

// What a step that is no message reads and writes. `codec`: of steps that need one.
int64_t memory_bytes_of(const Step& step, DType dtype, const Compressor* codec);
// How long a message is; where that varies, as long as most are.
int64_t typical_message_bytes(const Step& step, const Compressor* codec);

}  // namespace zeropg

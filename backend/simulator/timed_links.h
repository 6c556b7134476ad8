// The links of a timed group's nodes, shared by all messages that use them.
//
// A message passes its node's link and, where it crosses to another rack, the uplink; then the other rack's uplink and
// the receiver's node's link. No link stores it: it begins on one when it has begun on the one before and that one is
// free. Each carries one message after the other, in the order in which they reach it, whoever sends: so one that sends
// alone has all of it, and many that send at once have their parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "backend/simulator/rank_clock.h"

namespace zeropg {

// In bytes per us, of each direction.
struct LinkSpeeds {
  double latency_us = 1;
  std::vector<double> of_nodes{};
  std::vector<int32_t> rack_of_nodes{};  // empty: uplinks do not limit
  std::vector<double> of_uplinks{};      // by rack

  bool crosses_racks(int32_t node, int32_t other) const {
    return !rack_of_nodes.empty() && rack_of_nodes[node] != rack_of_nodes[other];
  }
  double of_uplink(int32_t node) const { return rack_of_nodes.empty() ? 0 : of_uplinks[rack_of_nodes[node]]; }
  // What a node has of its uplink when all nodes behind it send.
  double part_of_uplink(int32_t node) const;
};

// A message on its way through the links of one end.
struct Flight {
  bool is_arriving = false;  // of the receiver's end
  bool crosses_racks = false;
  bool is_empty = false;
  int32_t links_passed = 0;
  int32_t node = 0;  // of that end: its place in TimedLinks
  int32_t from = 0;  // ranks
  int32_t to = 0;
  int64_t bytes = 0;
  double time_us = 0;  // when it reaches the next link
  double end_us = 0;   // when all of it has passed the links before
};

class TimedLinks {
 public:
  // Of these nodes, in this order. Where they are not all there are, each has its part of an uplink for itself.
  TimedLinks(const LinkSpeeds& speeds, const std::vector<int32_t>& nodes);

  void enter(const Flight& flight);
  bool has_flights() const { return !queue_.empty(); }
  // Takes the flight that reaches its next link first over that link. Returns it if it has passed all links of its end.
  std::optional<Flight> advance();

 private:
  struct Link {
    double bytes_per_us;
    LinkClock clock{};
  };
  struct Links {
    std::vector<Link> of_nodes;
    std::vector<Link> uplinks;
  };
  struct Queued {
    double time_us;
    uint32_t order;  // of those that come at one time
    uint32_t flight;
    bool operator<(const Queued& other) const {  // the earliest one is on top
      return time_us != other.time_us ? time_us > other.time_us : order > other.order;
    }
  };

  Links out_;
  Links in_;
  std::vector<int32_t> uplink_of_;  // by place
  std::vector<Flight> flights_;     // those of `queue_`, and free places
  std::vector<uint32_t> free_;
  std::priority_queue<Queued> queue_;
  uint32_t next_order_ = 0;
};

}  // namespace zeropg

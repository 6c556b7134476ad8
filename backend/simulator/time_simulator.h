// The time that schedules take on a model of nodes and links: as the schedule simulator says, but without bytes, and of
// groups that are too large for it.
//
// Nodes that are alike need not all be simulated: one of them, with all its ranks, stands for the others. What a rank
// receives from a node that is not simulated comes when the node that stands for it sends the same to the node at the
// same distance, counted round NodeRings. So it is right for schedules that are the same from every node on, and for
// all where every node stands for itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/collectives/reduce/reduce.h"
#include "backend/collectives/schedule/schedule.h"
#include "backend/collectives/select/select.h"
#include "backend/simulator/timed_links.h"
#include "compression/compressor.h"

namespace zeropg {

// Nodes in rings of one size: those of a ring follow each other, and the rings do. A distance is so far along the own
// ring and so many rings on; with one ring it is counted round all nodes.
struct NodeRings {
  int32_t nodes = 1;
  int32_t ring_size = 1;

  int32_t distance(int32_t from, int32_t to) const {
    const int32_t along = (to % ring_size - from % ring_size + ring_size) % ring_size;
    return (to - to % ring_size - from + from % ring_size + nodes) % nodes + along;
  }
  int32_t at(int32_t from, int32_t distance) const {
    const int32_t along = (from + distance) % ring_size;
    return (from - from % ring_size + distance - distance % ring_size) % nodes + along;
  }
  int32_t from(int32_t to, int32_t distance) const {
    const int32_t along = (to % ring_size - distance % ring_size + ring_size) % ring_size;
    return (to - to % ring_size - distance + distance % ring_size + nodes) % nodes + along;
  }
};

struct TimedNode {
  int32_t node = 0;
  std::vector<Schedule> schedules{};  // one for each of its ranks, in its order
};

struct TimedGroup {
  std::vector<std::vector<int32_t>> nodes{};  // as in CollectiveSpec, but not empty
  std::vector<TimedNode> timed{};
  std::vector<int32_t> stands_for{};  // by node: the place in `timed` of who stands for it
  int32_t ring_size = 0;              // 0: all nodes are one ring

  NodeRings rings() const {
    const auto count = static_cast<int32_t>(nodes.size());
    return {.nodes = count, .ring_size = ring_size == 0 ? count : ring_size};
  }
  LinkSpeeds links{};
  CostModel model{};  // of barriers, memory and messages
  DType dtype = DType::kFloat32;
  const Compressor* codec = nullptr;
};

// When the last of the simulated ranks is done. Throws SimulationError where ranks wait for what nobody sends.
double simulate_time(const TimedGroup& group);

// Of a loop's steps, those from `begin` to before `end`, but for barriers, which may have more; if it has nothing else,
// of those.
int64_t most_chunks(const Schedule& schedule, size_t begin, size_t end);
// The schedule of the first chunks of its tensors: that many, in each loop, and the shorter last one among them.
Schedule shortened(const Schedule& schedule, int64_t chunks);

}  // namespace zeropg

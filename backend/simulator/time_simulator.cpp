#include "backend/simulator/time_simulator.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/simulator/schedule_simulator.h"

namespace zeropg {

namespace {

constexpr int32_t kNobody = -1;

struct RankInNode {
  int32_t node = 0;
  int32_t local_rank = 0;
};

struct ArrivedMessage {
  double end_us;
  bool is_empty;  // a header alone: the next message of that pair takes it along
};

struct Arrivals {
  std::vector<ArrivedMessage> messages{};
  size_t received = 0;

  void take() {
    if (++received < messages.size()) return;
    messages.clear();
    received = 0;
  }
};

struct TimedRank {
  ScheduleCursor cursor;
  int32_t rank;
  int32_t timed;  // its node's place in TimedGroup::timed
  RankClock clock{};
  bool is_at_barrier = false;
  bool is_ready = true;                                  // to take steps
  int32_t waits_for = kNobody;                           // the sender of the message without which it cannot
  std::unordered_map<int32_t, Arrivals> arrived_from{};  // by sender
};

std::vector<int32_t> nodes_of(const std::vector<TimedNode>& timed) {
  std::vector<int32_t> nodes;
  for (const TimedNode& each : timed) nodes.push_back(each.node);
  return nodes;
}

// Ranks go as far as they can; then the message that reaches a link first does, which may let others go on. Nothing
// that happens later reaches a link earlier.
class TimeSimulation {
 public:
  explicit TimeSimulation(const TimedGroup& group) : group_(group), links_(group.links, nodes_of(group.timed)) {
    size_t world_size = 0;
    for (const auto& node : group.nodes) world_size += node.size();
    places_.resize(world_size);
    for (size_t node = 0; node < group.nodes.size(); ++node) {
      for (size_t i = 0; i < group.nodes[node].size(); ++i) {
        places_[group.nodes[node][i]] = {static_cast<int32_t>(node), static_cast<int32_t>(i)};
      }
    }
    for (const TimedNode& timed : group.timed) {
      first_ranks_.push_back(ranks_.size());
      for (size_t i = 0; i < timed.schedules.size(); ++i) {
        ranks_.push_back({.cursor = ScheduleCursor(timed.schedules[i]),
                          .rank = group.nodes[timed.node][i],
                          .timed = static_cast<int32_t>(first_ranks_.size()) - 1});
      }
    }
  }

  double run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) ready_.push_back(rank);
    go_on();
    while (links_.has_flights()) {
      if (const auto flight = links_.advance()) land(*flight);
      go_on();
    }
    double latest_us = 0;
    for (const TimedRank& rank : ranks_) {
      if (!rank.cursor.is_done()) {
        throw SimulationError("deadlock: rank " + std::to_string(rank.rank) + " cannot go on from step " +
                              std::to_string(rank.cursor.position().step));
      }
      latest_us = std::max(latest_us, rank.clock.now_us);
    }
    return latest_us;
  }

 private:
  bool is_near(int32_t a, int32_t b) const { return places_[a].node == places_[b].node; }
  bool is_everybody_timed() const { return group_.timed.size() == group_.nodes.size(); }

  void go_on() {
    while (!ready_.empty()) {
      TimedRank& rank = ranks_[ready_.back()];
      ready_.pop_back();
      while (!rank.cursor.is_done() && !rank.is_at_barrier && take_step(rank)) {
      }
      rank.is_ready = false;
    }
  }

  void wake(size_t index) {
    if (!std::exchange(ranks_[index].is_ready, true)) ready_.push_back(index);
  }

  bool take_step(TimedRank& rank) {
    const Step& step = rank.cursor.step();
    switch (step.kind) {
      case StepKind::kBarrier:
        arrive(rank);
        return true;
      case StepKind::kSend:
        send(rank, step);
        break;
      case StepKind::kReceive:
        if (!receive(rank, step)) return false;
        break;
      default:
        rank.clock.work(memory_bytes_of(step, group_.dtype, group_.codec), group_.model);
    }
    rank.cursor.next();
    return true;
  }

  void arrive(TimedRank& rank) {
    rank.is_at_barrier = true;
    const size_t first = first_ranks_[rank.timed];
    const size_t count = group_.timed[rank.timed].schedules.size();
    double latest_us = 0;
    for (size_t i = first; i < first + count; ++i) {
      if (!ranks_[i].is_at_barrier) return;
      latest_us = std::max(latest_us, ranks_[i].clock.now_us);
    }
    for (size_t i = first; i < first + count; ++i) {
      ranks_[i].clock.now_us = latest_us + group_.model.barrier_us;
      ranks_[i].is_at_barrier = false;
      ranks_[i].cursor.next();
      wake(i);
    }
  }

  void send(TimedRank& rank, const Step& step) {
    const int64_t bytes = typical_message_bytes(step, group_.codec);
    if (is_near(rank.rank, step.peer)) {
      deliver(first_ranks_[rank.timed] + places_[step.peer].local_rank, rank.rank,
              {rank.clock.send_near({}, bytes), bytes == 0});
      return;
    }
    rank.clock.give_far(group_.model);
    links_.enter({.crosses_racks = group_.links.crosses_racks(places_[rank.rank].node, places_[step.peer].node),
                  .is_empty = bytes == 0,
                  .node = rank.timed,
                  .from = rank.rank,
                  .to = step.peer,
                  .bytes = bytes,
                  .time_us = rank.clock.now_us});
  }

  // At the end of one end's links: the receivers', or the receiver itself.
  void land(Flight flight) {
    const int32_t local_rank = places_[flight.to].local_rank;
    if (flight.is_arriving) {
      deliver(first_ranks_[flight.node] + local_rank, flight.from, {flight.end_us, flight.is_empty});
      return;
    }
    const int32_t sender = std::exchange(flight.node, 0);
    flight.is_arriving = true;
    flight.links_passed = 0;
    flight.time_us += group_.links.latency_us;
    flight.end_us += group_.links.latency_us;
    if (is_everybody_timed()) {
      flight.node = group_.stands_for[places_[flight.to].node];
      links_.enter(flight);
      return;
    }
    const RankInNode from = places_[flight.from];
    const int32_t distance = group_.rings().distance(from.node, places_[flight.to].node);
    for (; flight.node < static_cast<int32_t>(group_.timed.size()); ++flight.node) {
      const int32_t node = group_.timed[flight.node].node;
      const int32_t source = group_.rings().from(node, distance);
      if (group_.stands_for[source] != sender) continue;
      flight.from = group_.nodes[source][from.local_rank];
      flight.to = group_.nodes[node][local_rank];
      links_.enter(flight);
    }
  }

  void deliver(size_t receiver, int32_t sender, const ArrivedMessage& message) {
    TimedRank& rank = ranks_[receiver];
    rank.arrived_from[sender].messages.push_back(message);
    if (rank.waits_for != sender) return;
    rank.waits_for = kNobody;
    wake(receiver);
  }

  bool receive(TimedRank& rank, const Step& step) {
    Arrivals& arrived = rank.arrived_from[step.peer];
    while (!arrived.messages.empty() && step.bytes > 0 && arrived.messages[arrived.received].is_empty) arrived.take();
    if (arrived.messages.empty()) {
      rank.waits_for = step.peer;
      return false;
    }
    rank.clock.receive_near(arrived.messages[arrived.received].end_us);
    arrived.take();
    if (!is_near(rank.rank, step.peer)) rank.clock.take_far(group_.model);
    return true;
  }

  const TimedGroup& group_;
  TimedLinks links_;
  std::vector<RankInNode> places_;  // by rank
  std::vector<TimedRank> ranks_;
  std::vector<size_t> first_ranks_;  // by timed node
  std::vector<size_t> ready_;        // ranks
};

}  // namespace

int64_t most_chunks(const Schedule& schedule, size_t begin, size_t end) {
  int64_t most = 0;
  int64_t most_barriers = 0;
  for (size_t i = begin; i < end; ++i) {
    const Step& step = schedule.steps[i];
    int64_t& found = step.kind == StepKind::kBarrier ? most_barriers : most;
    found = std::max(found, step.chunks);
  }
  return most > 0 ? most : most_barriers;
}

double simulate_time(const TimedGroup& group) { return TimeSimulation(group).run(); }

// A barrier may have more chunks than what it separates: as many more than before.
Schedule shortened(const Schedule& schedule, int64_t chunks) {
  Schedule result = schedule;
  size_t begin = 0;
  for (size_t loop = 0; loop <= schedule.loop_ends.size(); ++loop) {
    const size_t end = loop < schedule.loop_ends.size() ? schedule.loop_ends[loop] : schedule.steps.size();
    const int64_t dropped = std::max<int64_t>(0, most_chunks(schedule, begin, end) - chunks);
    for (size_t i = begin; i < end; ++i) {
      Step& step = result.steps[i];
      if (step.kind != StepKind::kBarrier) {
        step.chunks = std::min(step.chunks, chunks);
        if (step.chunks == 1 && schedule.steps[i].chunks > 1) step.bytes = step.last_bytes;
      } else if (step.chunks > chunks) {
        step.chunks -= dropped;
      }
    }
    begin = end;
  }
  return result;
}

}  // namespace zeropg

#include "backend/simulator/time_simulator.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/simulator/schedule_simulator.h"

namespace zeropg {

namespace {

struct RankInNode {
  int32_t node = 0;
  int32_t local_rank = 0;
};

struct SentMessage {
  double arrival_us;
  bool is_empty;  // a header alone: the next message of that pair takes it along
};

struct TimedRank {
  ScheduleCursor cursor;
  int32_t rank;
  int32_t timed;  // its node's place in TimedGroup::timed
  RankClock clock{};
  bool is_at_barrier = false;
  std::unordered_map<int64_t, std::vector<SentMessage>> sent{};  // by where to
  std::unordered_map<int32_t, size_t> received{};                // messages, by sender
};

class TimeSimulation {
 public:
  explicit TimeSimulation(const TimedGroup& group) : group_(group) {
    size_t world_size = 0;
    for (const auto& node : group.nodes) world_size += node.size();
    places_.resize(world_size);
    for (size_t node = 0; node < group.nodes.size(); ++node) {
      for (size_t i = 0; i < group.nodes[node].size(); ++i) {
        places_[group.nodes[node][i]] = {static_cast<int32_t>(node), static_cast<int32_t>(i)};
        largest_node_ = std::max(largest_node_, static_cast<int64_t>(i) + 1);
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

  // Each rank as far as it goes: times do not depend on who is first.
  double run() {
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      for (TimedRank& rank : ranks_) {
        while (!rank.cursor.is_done() && !rank.is_at_barrier && take_step(rank)) has_moved = true;
      }
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

  // Where a message goes, counted from the sender's node on.
  int64_t way(int32_t from, int32_t to) const {
    const int64_t distance = group_.rings().distance(places_[from].node, places_[to].node);
    return distance * largest_node_ + places_[to].local_rank;
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
    }
  }

  void send(TimedRank& rank, const Step& step) {
    const int64_t bytes = typical_message_bytes(step, group_.codec);
    const SimulatedLink link = group_.link(rank.rank, step.peer);
    const bool is_near_peer = is_near(rank.rank, step.peer);
    const double arrival_us =
        is_near_peer ? rank.clock.send_near(link, bytes) : rank.clock.send_far(link, bytes, group_.model);
    rank.sent[way(rank.rank, step.peer)].push_back({arrival_us, bytes == 0});
  }

  bool receive(TimedRank& rank, const Step& step) {
    const RankInNode from = places_[step.peer];
    const TimedRank& sender = ranks_[first_ranks_[group_.stands_for[from.node]] + from.local_rank];
    const auto sent = sender.sent.find(way(step.peer, rank.rank));
    size_t& received = rank.received[step.peer];
    if (sent == sender.sent.end()) return false;
    const std::vector<SentMessage>& messages = sent->second;
    while (step.bytes > 0 && received < messages.size() && messages[received].is_empty) ++received;
    if (received == messages.size()) return false;
    const double arrival_us = messages[received++].arrival_us;
    if (is_near(rank.rank, step.peer)) {
      rank.clock.receive_near(arrival_us);
    } else {
      rank.clock.receive_far(group_.link(step.peer, rank.rank), arrival_us, typical_message_bytes(step, group_.codec));
      rank.clock.take_far(group_.model);
    }
    return true;
  }

  const TimedGroup& group_;
  std::vector<RankInNode> places_;  // by rank
  int64_t largest_node_ = 0;
  std::vector<TimedRank> ranks_;
  std::vector<size_t> first_ranks_;  // by timed node
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

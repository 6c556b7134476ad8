#include "backend/simulator/schedule_simulator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/simulator/local_steps.h"
#include "backend/simulator/rank_programs.h"
#include "backend/simulator/simulated_memory.h"
#include "backend/simulator/simulated_messages.h"
#include "backend/simulator/simulated_nodes.h"

namespace zeropg {

namespace {

std::vector<RankAccount> empty_accounts(int32_t world_size) {
  RankAccount account;
  account.traffic.sent_bytes.assign(world_size, 0);
  account.traffic.staged_read_bytes.assign(world_size, 0);
  return std::vector<RankAccount>(world_size, account);
}

// Which rank runs next, and what its step is; ranks meet at barriers.
class Simulation {
 public:
  Simulation(const SimulatorOptions& options, const std::vector<SimulatedOperation>& operations)
      : options_(options),
        nodes_(options),
        programs_(operations, nodes_, options.world_size),
        accounts_(empty_accounts(options.world_size)),
        memory_(options, nodes_, programs_, accounts_),
        local_steps_(options, programs_, memory_, accounts_),
        messages_(options, nodes_, programs_, memory_, accounts_),
        is_at_barrier_(options.world_size),
        dice_(options.seed) {}

  std::vector<Traffic> run() {
    take_steps_at_random();
    for (int32_t rank = 0; rank < options_.world_size; ++rank) {
      if (!programs_.is_done(rank)) throw SimulationError(deadlock_report());
    }
    messages_.check_all_received();
    std::vector<Traffic> traffic;
    for (RankAccount& account : accounts_) {
      account.traffic.time_us = account.clock.now_us;
      traffic.push_back(std::move(account.traffic));
    }
    return traffic;
  }

 private:
  void take_steps_at_random() {
    while (true) {
      const int32_t rank = draw_rank();
      if (rank < 0) break;
      take_step(rank);
    }
  }

  std::string deadlock_report() const {
    std::string text = "deadlock: no rank can go on";
    for (int32_t rank = 0; rank < options_.world_size; ++rank) {
      text += "\n  " + programs_.describe(rank);
      const int64_t moved_bytes = messages_.moved_bytes(rank);
      if (moved_bytes > 0) text += ", " + std::to_string(moved_bytes) + " bytes moved";
    }
    return text;
  }

  bool can_step(int32_t rank) const {
    if (programs_.is_done(rank) || is_at_barrier_[rank]) return false;
    const StepKind kind = programs_.step_of(rank).kind;
    if (kind == StepKind::kSend) return messages_.can_send(rank);
    if (kind == StepKind::kReceive) return messages_.can_receive(rank);
    return true;
  }

  // One rank is favoured for a while and one starved, so that skews grow as far as the schedule allows.
  int32_t draw_rank() {
    if (dice_.draw(16) == 0) {
      favoured_ = dice_.draw(options_.world_size);
      starved_ = dice_.draw(options_.world_size);
    }
    if (dice_.draw(4) != 0 && can_step(favoured_)) return favoured_;
    const int32_t first = dice_.draw(options_.world_size);
    int32_t found = -1;
    for (int32_t i = 0; i < options_.world_size; ++i) {
      const int32_t rank = (first + i) % options_.world_size;
      if (!can_step(rank)) continue;
      if (rank != starved_) return rank;
      found = rank;
    }
    return found;
  }

  void take_step(int32_t rank) {
    switch (programs_.step_of(rank).kind) {
      case StepKind::kCopy:
        local_steps_.copy(rank);
        return finish_step(rank);
      case StepKind::kReduce:
        local_steps_.reduce_sources(rank);
        return finish_step(rank);
      case StepKind::kBarrier:
        return arrive(rank);
      case StepKind::kSend:
        if (messages_.send(rank, dice_)) finish_step(rank);
        return;
      case StepKind::kReceive:
        if (messages_.receive(rank)) finish_step(rank);
        return;
      case StepKind::kEncode:
        local_steps_.encode(rank);
        return finish_step(rank);
      case StepKind::kDecode:
      case StepKind::kDecodeAdd:
        local_steps_.decode(rank);
        return finish_step(rank);
      case StepKind::kSelect:
        local_steps_.select(rank);
        return finish_step(rank);
    }
  }

  void finish_step(int32_t rank) {
    if (programs_.finish_step(rank)) memory_.begin_operation(rank);
  }

  void arrive(int32_t rank) {
    is_at_barrier_[rank] = true;
    ++accounts_[rank].traffic.barriers;
    const std::vector<int32_t>& node = nodes_.ranks_beside(rank);
    double latest_us = 0;
    for (const int32_t each : node) {
      if (!is_at_barrier_[each]) return;
      latest_us = std::max(latest_us, accounts_[each].clock.now_us);
    }
    memory_.open_barrier(rank);
    for (const int32_t each : node) {
      accounts_[each].clock.now_us = latest_us + options_.model.barrier_us;
      is_at_barrier_[each] = false;
      finish_step(each);
    }
  }

  const SimulatorOptions& options_;
  SimulatedNodes nodes_;
  RankPrograms programs_;
  std::vector<RankAccount> accounts_;
  SimulatedMemory memory_;
  LocalSteps local_steps_;
  SimulatedMessages messages_;
  std::vector<bool> is_at_barrier_;
  Dice dice_;
  int32_t favoured_ = 0;
  int32_t starved_ = 0;
};

}  // namespace

std::vector<Traffic> simulate(const SimulatorOptions& options, const std::vector<SimulatedOperation>& operations) {
  return Simulation(options, operations).run();
}

std::vector<std::vector<int64_t>> bytes_between_nodes(const std::vector<Traffic>& traffic,
                                                      const std::vector<std::vector<int32_t>>& nodes) {
  std::vector<std::vector<int64_t>> bytes(nodes.size(), std::vector<int64_t>(nodes.size(), 0));
  for (size_t from = 0; from < nodes.size(); ++from) {
    for (size_t to = 0; to < nodes.size(); ++to) {
      if (from == to) continue;
      for (const int32_t sender : nodes[from]) {
        for (const int32_t receiver : nodes[to]) bytes[from][to] += traffic[sender].sent_bytes[receiver];
      }
    }
  }
  return bytes;
}

}  // namespace zeropg

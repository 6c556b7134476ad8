// Messages of a simulated group on their way, with the time that they take. For schedule_simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "backend/simulator/rank_programs.h"
#include "backend/simulator/simulated_memory.h"
#include "backend/simulator/simulated_nodes.h"

namespace zeropg {

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int32_t draw(int64_t count) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(count)); }

 private:
  std::mt19937_64 random_;
};

class SimulatedMessages {
 public:
  // All must outlive it. `accounts`: by rank.
  SimulatedMessages(const SimulatorOptions& options, const SimulatedNodes& nodes, const RankPrograms& programs,
                    SimulatedMemory& memory, std::vector<RankAccount>& accounts);

  // Of the step that the rank is at.
  bool can_send(int32_t rank) const;
  bool can_receive(int32_t rank) const;
  // As much as there is room for, or a part of it, as the dice say. Return whether that was the last part.
  bool send(int32_t rank, Dice& dice);
  bool receive(int32_t rank);
  int64_t moved_bytes(int32_t rank) const { return ranks_[rank].moved_bytes; }

  // Throws SimulationError where something was sent and never received.
  void check_all_received() const;

 private:
  struct Mailbox {
    struct Piece {
      int64_t size;
      std::vector<std::byte> bytes;
      double arrival_us;  // of its first byte between nodes, of its last one within a node
    };
    std::deque<Piece> pieces;
    int64_t used_bytes = 0;
  };
  // Of the current send or receive.
  struct Message {
    int64_t moved_bytes = 0;
    double arrival_us = 0;  // of what is sent
    std::vector<std::byte> received;
  };

  int64_t sent_length(int32_t rank);
  int64_t received_length(int32_t rank) const;
  double start(int32_t rank, int32_t peer, int64_t bytes);
  void take_time_to_receive(int32_t rank, int32_t peer, double arrival_us, int64_t bytes);
  void check_peer(int32_t rank) const;

  const SimulatorOptions& options_;
  const SimulatedNodes& nodes_;
  const RankPrograms& programs_;
  SimulatedMemory& memory_;
  std::vector<RankAccount>& accounts_;
  std::vector<Message> ranks_;
  std::map<std::pair<int32_t, int32_t>, Mailbox> mailboxes_;
};

}  // namespace zeropg

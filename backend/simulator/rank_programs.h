// What the ranks of a simulated group run one operation after the other, and where each of them is in it. For the parts
// of schedule_simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/simulator/schedule_simulator.h"
#include "backend/simulator/simulated_nodes.h"

namespace zeropg {

std::string to_string(const Region& region);

class RankPrograms {
 public:
  struct Place {
    size_t operation = 0;
    SchedulePosition position{};
  };

  // Every rank is at its first step. `operations` must outlive it. Throws as simulate.
  RankPrograms(const std::vector<SimulatedOperation>& operations, const SimulatedNodes& nodes, int32_t world_size);

  bool is_done(int32_t rank) const { return ranks_[rank].operation == operations_.size(); }
  // The others: of a rank that is not done.
  const SimulatedOperation& operation_of(int32_t rank) const { return operations_[ranks_[rank].operation]; }
  const Schedule& schedule_of(int32_t rank) const { return operation_of(rank).schedules[rank]; }
  const ScheduleCursor& cursor_of(int32_t rank) const { return *ranks_[rank].cursor; }
  const Step& step_of(int32_t rank) const { return ranks_[rank].cursor->step(); }
  Place place_of(int32_t rank) const;
  int32_t banks_used(int32_t rank) const { return ranks_[rank].banks_used; }  // by the operations that are done

  // Goes on to the next step. Returns whether another operation begins there.
  bool finish_step(int32_t rank);

  std::string describe(int32_t rank) const { return describe(rank, place_of(rank)); }
  std::string describe(int32_t rank, const Place& place) const;
  [[noreturn]] void fail(int32_t rank, const std::string& what) const;

 private:
  struct Rank {
    size_t operation = 0;
    std::optional<ScheduleCursor> cursor{};  // of the operation's schedule; none: all are done
    int32_t banks_used = 0;
  };

  void check_operations(const SimulatedNodes& nodes) const;
  void enter_operation(int32_t rank);
  void leave_operation(int32_t rank);

  const std::vector<SimulatedOperation>& operations_;
  std::vector<Rank> ranks_;
};

}  // namespace zeropg

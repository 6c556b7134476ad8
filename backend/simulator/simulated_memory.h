// All memory that the ranks of a simulated group reach, and who was where since the last barrier. For the parts of
// schedule_simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/simulator/rank_programs.h"
#include "backend/simulator/simulated_nodes.h"

namespace zeropg {

// What a rank has moved, and its time.
struct RankAccount {
  Traffic traffic{};
  RankClock clock{};
};

// Invariant: every access since the last barrier is in the log of its bank; a barrier that opens empties the logs, as
// it orders all that was done before it before all that follows.
class SimulatedMemory {
 public:
  // All must outlive it. `accounts`: by rank; reads of staging are counted there.
  SimulatedMemory(const SimulatorOptions& options, const SimulatedNodes& nodes, const RankPrograms& programs,
                  std::vector<RankAccount>& accounts);

  // The rank has begun an operation: its scratch holds nothing that a step has written.
  void begin_operation(int32_t rank);
  // All ranks of the node of this one are at a barrier.
  void open_barrier(int32_t rank);

  // The memory of a region for the step that `rank` is at, after checking that it lies inside its buffer and that no
  // other rank is at it. Throws SimulationError.
  std::byte* resolve(int32_t rank, const Region& region, int64_t bytes, bool is_write);
  template <class T>
  std::span<T> resolve_as(int32_t rank, const Region& region, int64_t bytes, bool is_write) {
    return {reinterpret_cast<T*>(resolve(rank, region, bytes, is_write)), static_cast<size_t>(bytes) / sizeof(T)};
  }
  // The same without the second check.
  std::byte* locate(int32_t rank, const Region& region, int64_t bytes, bool is_write);

 private:
  // From `begin` on: in a bank an offset, in tensors an address.
  template <class Place>
  struct Access {
    int32_t rank;
    Place begin;
    Place end;
    bool is_write;
    RankPrograms::Place place;
  };
  template <class Place>
  using Log = std::vector<Access<Place>>;
  struct Bank {
    std::vector<std::byte> bytes;
    Log<int64_t> accesses;
  };

  Bank& bank_of(int32_t rank, const Region& region);
  std::span<std::byte> tensor_of_peer(int32_t rank, const Region& region, bool is_write) const;
  template <class Place>
  void log_access(Log<Place>& log, const Access<Place>& access, const Region& region) const;

  const SimulatedNodes& nodes_;
  const RankPrograms& programs_;
  std::vector<RankAccount>& accounts_;
  std::vector<std::vector<std::byte>> scratch_;    // by rank
  std::vector<Bank> banks_;                        // two per slot
  std::vector<Log<const std::byte*>> of_tensors_;  // by node, of direct schedules
};

}  // namespace zeropg

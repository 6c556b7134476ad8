// The steps of a simulated rank that are neither messages nor barriers: what they do to memory. For schedule_simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/simulator/rank_programs.h"
#include "backend/simulator/simulated_memory.h"

namespace zeropg {

// Each function: the step that the rank is at, which is of that kind. Throws SimulationError.
class LocalSteps {
 public:
  // All must outlive it. `accounts`: by rank.
  LocalSteps(const SimulatorOptions& options, const RankPrograms& programs, SimulatedMemory& memory,
             std::vector<RankAccount>& accounts);

  void copy(int32_t rank);
  void reduce_sources(int32_t rank);
  void select(int32_t rank);
  void encode(int32_t rank);
  void decode(int32_t rank);

 private:
  void check_apart(int32_t rank, const std::byte* a, const std::byte* b, int64_t bytes) const;
  void spend(int32_t rank);
  const Compressor& codec_of(int32_t rank) const;
  std::span<float> residual_of(int32_t rank);
  bool has_selection(int32_t rank) const;

  const SimulatorOptions& options_;
  const RankPrograms& programs_;
  SimulatedMemory& memory_;
  std::vector<RankAccount>& accounts_;
  std::vector<Selection> selections_;  // by rank
};

}  // namespace zeropg

#include "backend/simulator/rank_programs.h"

#include <sstream>
#include <stdexcept>

namespace zeropg {

namespace {

const char* kind_name(StepKind kind) {
  constexpr const char* kNames[] = {"copy",   "reduce", "barrier",    "send",  "receive",
                                    "encode", "decode", "decode_add", "select"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace

std::string to_string(const Region& region) {
  constexpr const char* kNames[] = {"input", "output", "scratch", "staging", "peer_input", "peer_output", "residual"};
  std::ostringstream text;
  text << kNames[static_cast<size_t>(region.space)] << '[' << region.index << ']';
  if (region.space == Space::kStaging) text << " bank " << int{region.bank};
  text << " + " << region.offset_bytes;
  return text.str();
}

RankPrograms::RankPrograms(const std::vector<SimulatedOperation>& operations, const SimulatedNodes& nodes,
                           int32_t world_size)
    : operations_(operations), ranks_(world_size) {
  check_operations(nodes);
  for (int32_t rank = 0; rank < world_size; ++rank) enter_operation(rank);
}

void RankPrograms::check_operations(const SimulatedNodes& nodes) const {
  for (const SimulatedOperation& operation : operations_) {
    const size_t world_size = ranks_.size();
    if (operation.schedules.size() != world_size || operation.tensors.size() != world_size) {
      throw std::invalid_argument("simulate: an operation has " + std::to_string(operation.schedules.size()) +
                                  " schedules and " + std::to_string(operation.tensors.size()) +
                                  " sets of tensors, expected one per rank of " + std::to_string(world_size));
    }
    for (size_t rank = 0; rank < world_size; ++rank) {
      const Schedule& schedule = operation.schedules[rank];
      const Schedule& first = operation.schedules[nodes.ranks_beside(static_cast<int32_t>(rank))[0]];
      if (schedule.banks_used == first.banks_used) continue;
      throw SimulationError(schedule.algorithm + ": ranks of a node use " + std::to_string(schedule.banks_used) +
                            " and " + std::to_string(first.banks_used) +
                            " banks, so that their next operations would not agree on one");
    }
  }
}

RankPrograms::Place RankPrograms::place_of(int32_t rank) const {
  const Rank& each = ranks_[rank];
  return {each.operation, each.cursor ? each.cursor->position() : SchedulePosition()};
}

std::string RankPrograms::describe(int32_t rank, const Place& place) const {
  std::ostringstream text;
  text << "rank " << rank << ", operation " << place.operation;
  if (place.operation == operations_.size()) return text.str() + ": done";
  const Schedule& schedule = operations_[place.operation].schedules[rank];
  const Step step = step_of_chunk(schedule.steps[place.position.step], place.position.chunk);
  text << " " << schedule.algorithm << ", step " << place.position.step << " of " << schedule.steps.size();
  if (step.chunks > 1) text << " in chunk " << place.position.chunk << " of " << step.chunks;
  text << " (" << kind_name(step.kind);
  if (step.kind == StepKind::kSend) text << ' ' << step.bytes << " bytes to rank " << step.peer;
  if (step.kind == StepKind::kReceive) {
    text << ' ' << step.bytes << " bytes from rank " << step.peer;
  }
  if (step.peer < 0 && step.kind != StepKind::kBarrier) {
    text << ' ' << step.bytes << " bytes to " << to_string(step.destination);
  }
  text << ')';
  return text.str();
}

void RankPrograms::fail(int32_t rank, const std::string& what) const {
  throw SimulationError(describe(rank) + ": " + what);
}

// Schedules without steps are passed at once; the bank parity moves on with each schedule.
void RankPrograms::enter_operation(int32_t rank) {
  Rank& each = ranks_[rank];
  while (!is_done(rank)) {
    each.cursor.emplace(schedule_of(rank));
    if (!each.cursor->is_done()) return;
    leave_operation(rank);
  }
  each.cursor.reset();
}

void RankPrograms::leave_operation(int32_t rank) {
  ranks_[rank].banks_used += schedule_of(rank).banks_used;
  ++ranks_[rank].operation;
}

bool RankPrograms::finish_step(int32_t rank) {
  ScheduleCursor& cursor = *ranks_[rank].cursor;
  cursor.next();
  if (!cursor.is_done()) return false;
  leave_operation(rank);
  enter_operation(rank);
  return !is_done(rank);
}

}  // namespace zeropg

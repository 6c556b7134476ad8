// Runs one rank's schedule, step by step, as far as it goes without waiting.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/collectives/schedule/schedule_cursor.h"
#include "backend/engine/codec_steps.h"
#include "backend/engine/collective_context.h"
#include "backend/engine/direct_access.h"
#include "backend/engine/fingerprint_between_nodes.h"
#include "backend/engine/fingerprint_in_node.h"
#include "backend/group/planner.h"

namespace zeropg {

enum class Progress : uint8_t { kBlocked, kMoved, kDone };

// One collective of one group; at most one exists per group at a time, since it takes part in the group's counters.
class ScheduleExecutor {
 public:
  // All must outlive the execution.
  ScheduleExecutor(CollectiveContext& context, const PlannedCollective& collective, const OperationLabel& label);

  // Throws DistBackendError when the ranks called different collectives, DistNetworkError when a peer is gone.
  Progress advance();

  std::vector<int32_t> awaited() const;  // the ranks that this one waits for
  // For other ranks: Peers::note_wait. Throws DistBackendError when one of another node waits in a different call.
  void note_wait() const;
  std::string describe_wait() const;  // "in step 3 of 12 of broadcast_tree"
  const std::vector<double>& waiting_seconds() const { return waiting_seconds_; }  // per rank

 private:
  bool run(const Step& step);  // false: blocked
  void note_coding(const CodecCounters& counters);
  bool run_barrier();
  bool run_send(const Step& step);
  bool run_receive(const Step& step);
  bool receive_until(const Step& step, std::byte* destination, int64_t length);
  int64_t sized_length(const Step& step, const std::byte* message) const;
  void choose_schedule();
  bool is_direct() const { return schedule_ == collective_.direct.get(); }
  std::byte* address(const Region& region) const;
  void reduce_step(const Step& step);
  void note_blocked();
  void note_moved();

  CollectiveContext& context_;
  const PlannedCollective& collective_;
  const OperationLabel& label_;
  const CallFingerprint call_;
  const NodeFingerprints in_node_;
  InternodeFingerprints between_nodes_;
  DirectAccess direct_access_;
  const Schedule* schedule_ = nullptr;  // one of the two of collective_: Note [Direct schedules] in direct_access.h
  std::byte* scratch_ = nullptr;
  std::optional<CodecSteps> codec_steps_;  // where there is a codec

  ScheduleCursor cursor_;    // of schedule_
  int64_t moved_bytes_ = 0;  // of the current send or receive
  uint64_t barrier_ = 0;     // the count that the current barrier waits for; 0: not arrived yet
  bool is_announced_ = false;
  bool is_to_restart_ = false;
  bool has_given_banks_ = false;
  std::vector<double> waiting_seconds_;
  std::vector<int32_t> waiting_for_;                    // since wait_start_
  std::chrono::steady_clock::time_point wait_start_{};  // zero: not waiting
};

}  // namespace zeropg

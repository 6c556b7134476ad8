// The other ranks of a group, as this one sees them: who failed, left or died, and who waits for whom; and what this
// one tells them of itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/diagnostics/wait_graph.h"
#include "backend/group/operation_label.h"
#include "backend/topology/topology.h"
#include "backend/transport/network/remote_transport.h"
#include "backend/transport/shm/shm_arena.h"

namespace zeropg {

struct PeerStates {
  int32_t failed = -1;  // the first peer that has; -1: none
  std::string failure;  // what it says
  std::vector<int32_t> departed;
  std::vector<int32_t> dead;  // their processes are gone, or the way to them
  std::string loss;           // what happened to the connection to the first one of `dead`, if that is all we know
};
// Throws OperationError when a peer has failed, or when one of `awaited` has left or died.
void throw_if_lost(const OperationLabel& label, const PeerStates& peers, const std::vector<int32_t>& awaited);

// Any thread, in a Use of the group: Note [Use] in group_context.h.
class Peers {
 public:
  static constexpr int32_t kAnybody = -2;

  // All must outlive its use. `network` is null where all ranks are on one node.
  Peers(const Topology& topology, ShmArena& arena, RemoteTransport* network)
      : topology_(topology), arena_(arena), network_(network) {}

  PeerStates states();                                // system calls
  void throw_if_failed(const OperationLabel& label);  // cheap: before an operation begins
  // Tells all of them that this rank has failed, and why, or leaves.
  void tell_state(RankState state, const std::string& text = {});
  // "; no sign of life from ranks 2, 3", or "": which ranks of other nodes do not even answer.
  std::string silence() const;

  // What the progress of a lane waits for, said again at every check: `peer`, RankNotes::kAtBarrier or kAnybody, and
  // which ranks those are. Collectives also say in which call. Asks those on other nodes whether they live, and
  // `also_ask`: whom the lane waits for besides.
  void note_wait(Lane lane, int32_t peer, const std::vector<int32_t>& awaited,
                 const std::optional<WaitingCall>& call = {}, const std::vector<int32_t>& also_ask = {});
  WaitCulprits culprits_of(Lane lane, const std::vector<int32_t>& awaited);  // wait_graph.h

 private:
  std::vector<int32_t> dead_neighbours();
  std::vector<int32_t> awaited_by(int32_t peer, Lane lane) const;
  std::vector<int32_t> awaited_elsewhere(const std::vector<int32_t>& also) const;

  const Topology& topology_;
  ShmArena& arena_;
  RemoteTransport* const network_;
  std::mutex liveness_mutex_;
  std::chrono::steady_clock::time_point last_look_{};  // guarded by liveness_mutex_
  std::vector<int32_t> dead_;                          // guarded by liveness_mutex_
};

}  // namespace zeropg

// The memory that the ranks of one group share inside a node. Ranks here count the ranks of the group on this node.
//
// A sealed memfd, mapped by every rank and named nowhere in the file system, so that it vanishes with the last process.
// It holds, per rank: two slots of bytes that its users fill in turn, an arrival counter, a state word with the first
// error, and a staging slot of two banks. Mailboxes for point-to-point bytes live behind it (shm_transport.h).
// Every word has a single writer, the rank that it belongs to; a rank never trusts what a peer wrote for a length or an
// index without checking it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/platform/process/descriptor.h"
#include "backend/transport/rank_state.h"
#include "backend/transport/shm/rank_notes.h"
#include "backend/transport/transport.h"

namespace zeropg {

class ProcessLock;
class SealedMapping;

// The same on every rank of the group; a function of the options and the world size.
struct ArenaGeometry {
  int32_t world_size = 1;     // ranks of the group on this node
  int64_t bank_bytes = 0;     // multiple of 4096
  int64_t mailbox_bytes = 0;  // one ring per ordered pair and lane; power of two, 0: no mailboxes
  // ValueError when a field is out of range or the sum overflows.
  int64_t total_bytes() const;
};

// The ring of each pair among so many ranks of a node; at most `mailbox_bytes`, and a power of two where that is one.
// There are rings for all pairs, so from 65 ranks on each is smaller: together they take what those of 64 ranks take,
// as far as their smallest size allows. Schedules count with the rings, so all ranks of a group take the same number:
// that of its largest node.
constexpr int64_t shared_mailbox_bytes(int64_t mailbox_bytes, int32_t ranks) {
  constexpr int64_t kMostRanks = 64;
  constexpr int64_t kLeastBytes = 4096;
  int64_t shared = mailbox_bytes;
  while (shared > kLeastBytes && mailbox_bytes / shared * kMostRanks * kMostRanks < int64_t{ranks} * ranks) shared /= 2;
  return shared;
}

// How far a stream of bytes from one rank to another has come. Both count up for ever; each has one writer and a cache
// line of its own. What a peer wrote is checked before it is used (shm_transport.cpp).
struct MailboxCounters {
  alignas(64) std::atomic<uint64_t> sent;      // written by the sender
  alignas(64) std::atomic<uint64_t> received;  // written by the receiver
  std::atomic<uint64_t> answered;              // written by the receiver, for the user of the lane
};

// Errors here do not name rank and operation: the caller knows them.
class ShmArena {
 public:
  static constexpr int32_t kLanes = kLaneCount;
  static constexpr size_t kFailureBytes = zeropg::kFailureBytes;
  static constexpr size_t kSlotBytes = 768;

  // Makes the memfd (sealed against resizing; the number of its pages is checked against the memory that this process
  // may use, none is touched). Called by one rank; the descriptor is then passed to the others. DistBackendError.
  static int create(const ArenaGeometry& geometry);

  // Maps `fd` (takes ownership) and tells the peers that this rank is alive. Refuses a descriptor whose size, seals or
  // header are not what `geometry` demands. Nobody else may close a descriptor of the same memfd in this process while
  // the arena lives: see Note [POSIX locks] in process_lock.h.
  ShmArena(int fd, const ArenaGeometry& geometry, int32_t rank);
  ~ShmArena();  // departs, unless the rank has failed
  ShmArena(const ShmArena&) = delete;
  ShmArena& operator=(const ShmArena&) = delete;

  const ArenaGeometry& geometry() const { return geometry_; }
  int32_t rank() const { return rank_; }

  std::byte* staging(int32_t rank, int32_t bank) const;
  // What `rank` tells the others of its collective `sequence`, for their eyes only behind a barrier; written by that
  // rank alone, and overwritten by its collective `sequence` + 2. Aligned to cache lines.
  std::span<std::byte, kSlotBytes> slot(int32_t rank, uint64_t sequence) const;

  // The group's barrier: each rank counts its own arrivals. A barrier is passed when every rank's count is >= mine.
  void arrive(uint64_t count);             // release; the last one wakes sleepers
  bool all_arrived(uint64_t count) const;  // acquire
  std::vector<int32_t> missing(uint64_t count) const;

  // What `rank` says of itself; only that rank writes there.
  RankNotes& notes_of(int32_t rank) const;
  std::vector<int32_t> missing_for(int32_t rank) const;  // at the barrier that `rank` reached last

  // First error wins and is final; a departed rank stays departed. Wakes sleepers. Any thread.
  void set_state(RankState state, std::string_view error = {});
  RankState state_of(int32_t rank) const;
  std::string failure_of(int32_t rank) const;  // "" unless kFailed; at most kFailureBytes, printable
  // Whether the process of that rank still exists; true for a rank that has not joined yet (its deadline is the
  // bootstrap's). Look at state_of first: a rank that departed or failed may well have let go of its arena. A system
  // call: for slow paths only.
  bool is_process_alive(int32_t rank) const;

  // How a thread of the program sleeps, which waits for this arena alone: it says so, looks once more whether it can go
  // on, and if not, sleeps until a peer changes something or, at the latest, `until`. Any threads.
  template <typename Look>
  void doze(std::chrono::steady_clock::time_point until, const Look& can_go_on) {
    const uint32_t call = await_call();
    if (!can_go_on()) sleep_until(until, call);
  }

  // How the progress thread sleeps. Doorbells: one event descriptor per process, handed out in the bootstrap. A
  // sleeping rank sets its word, looks once more, then polls its descriptor (doorbell.h); a peer that changed something
  // rings those who sleep. Groups that share a process share its descriptor.
  // Index = rank, own entry empty; once, before use and after every rank has mapped the arena.
  void set_doorbells(std::vector<Descriptor> peer_event_fds);
  void set_sleeping(bool sleeping);
  void ring(int32_t peer);
  void ring_all();

  // The ring from one rank to another: `lane` 0 for collectives, 1 for user point-to-point.
  std::byte* mailbox(int32_t from, int32_t to, int32_t lane) const;
  MailboxCounters& mailbox_counters(int32_t from, int32_t to, int32_t lane) const;

 private:
  struct Header;
  struct RankBlock;
  RankBlock& block(int32_t rank) const;
  uint32_t await_call();
  void sleep_until(std::chrono::steady_clock::time_point until, uint32_t call);
  void wake(int32_t rank);  // if it sleeps
  int64_t mailbox_index(int32_t from, int32_t to, int32_t lane) const;

  ArenaGeometry geometry_;
  int32_t rank_ = 0;
  int64_t owner_pid_ = 0;  // a forked child that destroys its copy must not depart in its parent's name
  std::unique_ptr<ProcessLock> lock_;
  std::unique_ptr<SealedMapping> mapping_;
  std::atomic<bool> has_failed_{false};
  std::vector<std::shared_ptr<const Descriptor>> doorbells_;
};

}  // namespace zeropg

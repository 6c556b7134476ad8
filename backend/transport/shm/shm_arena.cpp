#include "backend/transport/shm/shm_arena.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backend/diagnostics/printable.h"
#include "backend/platform/memory/pages.h"
#include "backend/platform/memory/round_up.h"
#include "backend/platform/memory/sealed_memory.h"
#include "backend/platform/process/doorbell.h"
#include "backend/platform/process/futex.h"
#include "backend/platform/process/peer_doorbells.h"
#include "backend/platform/process/process_lock.h"

namespace zeropg {
namespace {

constexpr int64_t kMaxRanks = 4096;
constexpr int64_t kMaxBufferBytes = int64_t{1} << 40;
constexpr uint64_t kMagic = 0x32'61'67'70'6f'72'65'7a;  // "zeropga2"

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not need a lock of this process");
static_assert(sizeof(MailboxCounters) == 128);

// Where the regions of an arena lie; see README.md. None of this can overflow: the fields are limited below.
struct Layout {
  int64_t counters_offset = 0;
  int64_t staging_offset = 0;
  int64_t mailbox_offset = 0;
  int64_t total_bytes = 0;

  explicit Layout(const ArenaGeometry& geometry) {
    const int64_t ranks = geometry.world_size;
    const int64_t mailboxes = geometry.mailbox_bytes == 0 ? 0 : ranks * ranks * ShmArena::kLanes;
    counters_offset = kSmallPageBytes * (1 + ranks);
    const int64_t counters_end = counters_offset + mailboxes * static_cast<int64_t>(sizeof(MailboxCounters));
    staging_offset = round_up(counters_end, kBigPageBytes);
    mailbox_offset = staging_offset + ranks * 2 * geometry.bank_bytes;
    const __int128 total =
        static_cast<__int128>(mailbox_offset) + static_cast<__int128>(mailboxes) * geometry.mailbox_bytes;
    TORCH_CHECK_VALUE(total < (int64_t{1} << 60), "shared arena: bank_bytes ", geometry.bank_bytes,
                      " and mailbox_bytes ", geometry.mailbox_bytes, " are too large for ", ranks,
                      " ranks; lower them");
    total_bytes = static_cast<int64_t>(total);
  }
};

void check_geometry(const ArenaGeometry& geometry) {
  TORCH_CHECK_VALUE(geometry.world_size >= 1 && geometry.world_size <= kMaxRanks, "shared arena: world_size is ",
                    geometry.world_size, ", expected 1 to ", kMaxRanks, " ranks on a node");
  TORCH_CHECK_VALUE(
      geometry.bank_bytes >= 0 && geometry.bank_bytes <= kMaxBufferBytes && geometry.bank_bytes % kSmallPageBytes == 0,
      "shared arena: bank_bytes is ", geometry.bank_bytes, ", expected a multiple of ", kSmallPageBytes);
  const int64_t mailbox = geometry.mailbox_bytes;
  TORCH_CHECK_VALUE(mailbox == 0 || (mailbox >= 64 && mailbox <= kMaxBufferBytes &&
                                     std::has_single_bit(static_cast<uint64_t>(mailbox))),
                    "shared arena: mailbox_bytes is ", mailbox, ", expected 0 or a power of two of at least 64");
}

uint32_t* futex_word(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

}  // namespace

// Byte 0 of the arena; written once by the creator.
struct ShmArena::Header {
  uint64_t magic = kMagic;
  int64_t world_size = 0;
  int64_t bank_bytes = 0;
  int64_t mailbox_bytes = 0;

  bool operator==(const Header&) const = default;
};

// One page per rank, written by that rank only, but for `calls`. Words that are waited for have cache lines of
// their own.
struct ShmArena::RankBlock {
  alignas(64) std::atomic<uint64_t> arrived;
  alignas(64) std::atomic<uint32_t> state;
  alignas(64) std::atomic<uint32_t> is_sleeping;
  std::atomic<uint32_t> calls;  // a futex; odd: threads doze, and whoever wakes them makes it even
  alignas(64) std::atomic<uint64_t> nonce[2];
  RankNotes notes;
  alignas(256) std::byte slots[2][kSlotBytes];
  std::atomic<uint32_t> failure_bytes;
  char failure[kFailureBytes];
};

int64_t ArenaGeometry::total_bytes() const {
  check_geometry(*this);
  return Layout(*this).total_bytes;
}

int ShmArena::create(const ArenaGeometry& geometry) {
  Descriptor fd(create_sealed_memory("zeropg-arena", geometry.total_bytes()));
  const Header header{kMagic, geometry.world_size, geometry.bank_bytes, geometry.mailbox_bytes};
  if (::pwrite(fd.get(), &header, sizeof header, 0) != sizeof header) {
    C10_THROW_ERROR(DistBackendError, c10::str("shared arena: pwrite: ", std::strerror(errno)));
  }
  return fd.release();
}

ShmArena::ShmArena(int fd, const ArenaGeometry& geometry, int32_t rank)
    : geometry_(geometry), rank_(rank), owner_pid_(getpid()), lock_(std::make_unique<ProcessLock>(fd, rank)) {
  static_assert(sizeof(RankBlock) <= kSmallPageBytes);
  const int64_t total_bytes = geometry.total_bytes();
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < geometry.world_size);
  mapping_ = std::make_unique<SealedMapping>(fd, total_bytes);
  Header header;
  std::memcpy(&header, mapping_->data(), sizeof header);
  const Header expected{kMagic, geometry.world_size, geometry.bank_bytes, geometry.mailbox_bytes};
  if (header != expected) {
    C10_THROW_ERROR(DistBackendError, c10::str("shared arena: made for world_size ", header.world_size, ", bank_bytes ",
                                               header.bank_bytes, ", mailbox_bytes ", header.mailbox_bytes,
                                               ", expected ", expected.world_size, ", ", expected.bank_bytes, ", ",
                                               expected.mailbox_bytes, "; give every rank the same options"));
  }
  RankBlock& own = block(rank);
  const auto nonce = process_nonce();
  own.nonce[0].store(nonce[0], std::memory_order_relaxed);
  own.nonce[1].store(nonce[1], std::memory_order_relaxed);
  own.state.store(static_cast<uint32_t>(RankState::kAlive), std::memory_order_release);
}

ShmArena::~ShmArena() {
  if (getpid() == owner_pid_) set_state(RankState::kDeparted);
}

ShmArena::RankBlock& ShmArena::block(int32_t rank) const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(rank >= 0 && rank < geometry_.world_size);
  return *reinterpret_cast<RankBlock*>(mapping_->data() + kSmallPageBytes * (1 + static_cast<int64_t>(rank)));
}

std::byte* ShmArena::staging(int32_t rank, int32_t bank) const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(rank >= 0 && rank < geometry_.world_size && (bank == 0 || bank == 1));
  const int64_t slot = static_cast<int64_t>(rank) * 2 + bank;
  return mapping_->data() + Layout(geometry_).staging_offset + slot * geometry_.bank_bytes;
}

std::span<std::byte, ShmArena::kSlotBytes> ShmArena::slot(int32_t rank, uint64_t sequence) const {
  return block(rank).slots[sequence % 2];
}

void ShmArena::arrive(uint64_t count) {
  block(rank_).arrived.store(count, std::memory_order_release);
  // Who comes last wakes the others, and of several who come at once, at least the last one sees all. (As in Note [Lost
  // wake-ups].)
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (all_arrived(count)) ring_all();
}

bool ShmArena::all_arrived(uint64_t count) const {
  for (int32_t rank = 0; rank < geometry_.world_size; ++rank) {
    if (block(rank).arrived.load(std::memory_order_acquire) < count) return false;
  }
  return true;
}

std::vector<int32_t> ShmArena::missing(uint64_t count) const {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < geometry_.world_size; ++rank) {
    if (block(rank).arrived.load(std::memory_order_acquire) < count) ranks.push_back(rank);
  }
  return ranks;
}

RankNotes& ShmArena::notes_of(int32_t rank) const { return block(rank).notes; }

std::vector<int32_t> ShmArena::missing_for(int32_t rank) const {
  return missing(block(rank).arrived.load(std::memory_order_acquire));
}

void ShmArena::set_state(RankState state, std::string_view error) {
  RankBlock& own = block(rank_);
  if (state == RankState::kFailed) {
    if (has_failed_.exchange(true)) return;  // the text below has one writer, and the first error is the cause
    const size_t bytes = std::min(error.size(), kFailureBytes);
    std::memcpy(own.failure, error.data(), bytes);
    own.failure_bytes.store(static_cast<uint32_t>(bytes), std::memory_order_relaxed);
    own.state.store(static_cast<uint32_t>(state), std::memory_order_release);
  } else {
    uint32_t current = own.state.load(std::memory_order_relaxed);
    while (current < static_cast<uint32_t>(RankState::kFailed) &&
           !own.state.compare_exchange_weak(current, static_cast<uint32_t>(state), std::memory_order_release)) {
    }
  }
  ring_all();
}

RankState ShmArena::state_of(int32_t rank) const {
  const uint32_t state = block(rank).state.load(std::memory_order_acquire);
  // A value that no zeropg writes: the peer's memory is corrupt, so it is not one to go on with.
  return state <= static_cast<uint32_t>(RankState::kDeparted) ? static_cast<RankState>(state) : RankState::kFailed;
}

std::string ShmArena::failure_of(int32_t rank) const {
  if (state_of(rank) != RankState::kFailed) return "";
  const RankBlock& peer = block(rank);
  const size_t bytes = std::min<size_t>(peer.failure_bytes.load(std::memory_order_relaxed), kFailureBytes);
  return printable({peer.failure, bytes}, kFailureBytes);
}

bool ShmArena::is_process_alive(int32_t rank) const {
  const RankBlock& peer = block(rank);
  if (rank == rank_ || peer.state.load(std::memory_order_acquire) == static_cast<uint32_t>(RankState::kJoining)) {
    return true;
  }
  const auto nonce = process_nonce();
  const bool is_same_process = peer.nonce[0].load(std::memory_order_relaxed) == nonce[0] &&
                               peer.nonce[1].load(std::memory_order_relaxed) == nonce[1];
  return is_same_process || lock_->is_held_elsewhere(rank);
}

void ShmArena::set_doorbells(std::vector<Descriptor> peer_event_fds) {
  TORCH_INTERNAL_ASSERT(peer_event_fds.size() == static_cast<size_t>(geometry_.world_size));
  doorbells_.resize(peer_event_fds.size());
  for (size_t rank = 0; rank < peer_event_fds.size(); ++rank) {
    if (!peer_event_fds[rank]) continue;
    const RankBlock& peer = block(static_cast<int32_t>(rank));
    const std::array<uint64_t, 2> process{peer.nonce[0].load(std::memory_order_relaxed),
                                          peer.nonce[1].load(std::memory_order_relaxed)};
    doorbells_[rank] = share_doorbell(process, std::move(peer_event_fds[rank]));
  }
}

// Note [Lost wake-ups]
// A sleeper stores its word and then looks at the flags; a peer stores a flag and then looks at the word. With a full
// fence between the two on either side, at least one of them sees the other's store: the sleeper does not go to sleep,
// or the peer rings.
void ShmArena::set_sleeping(bool sleeping) {
  block(rank_).is_sleeping.store(sleeping ? 1 : 0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// A thread sleeps only while the number is the one it has seen: when the rank was woken and a second thread has come to
// doze since then, it is another one.
uint32_t ShmArena::await_call() {
  const uint32_t call = block(rank_).calls.fetch_or(1, std::memory_order_relaxed) | 1;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return call;
}

void ShmArena::sleep_until(std::chrono::steady_clock::time_point until, uint32_t call) {
  const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
  futex_wait(futex_word(block(rank_).calls), call, std::max(left, std::chrono::nanoseconds::zero()));
}

void ShmArena::ring(int32_t peer) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake(peer);
}

void ShmArena::ring_all() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int32_t rank = 0; rank < geometry_.world_size; ++rank) wake(rank);
}

void ShmArena::wake(int32_t rank) {
  RankBlock& sleeper = block(rank);
  const auto place = static_cast<size_t>(rank);
  if (sleeper.is_sleeping.load(std::memory_order_relaxed) != 0 && place < doorbells_.size() && doorbells_[place]) {
    ring_doorbell(doorbells_[place]->get());
  }
  uint32_t call = sleeper.calls.load(std::memory_order_relaxed);
  if (call % 2 == 1 && sleeper.calls.compare_exchange_strong(call, call + 1, std::memory_order_relaxed)) {
    futex_wake_all(futex_word(sleeper.calls));
  }
}

int64_t ShmArena::mailbox_index(int32_t from, int32_t to, int32_t lane) const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(geometry_.mailbox_bytes > 0 && from >= 0 && from < geometry_.world_size && to >= 0 &&
                                   to < geometry_.world_size && lane >= 0 && lane < kLanes);
  return (static_cast<int64_t>(from) * geometry_.world_size + to) * kLanes + lane;
}

std::byte* ShmArena::mailbox(int32_t from, int32_t to, int32_t lane) const {
  return mapping_->data() + Layout(geometry_).mailbox_offset + mailbox_index(from, to, lane) * geometry_.mailbox_bytes;
}

MailboxCounters& ShmArena::mailbox_counters(int32_t from, int32_t to, int32_t lane) const {
  std::byte* counters = mapping_->data() + Layout(geometry_).counters_offset;
  return reinterpret_cast<MailboxCounters*>(counters)[mailbox_index(from, to, lane)];
}

}  // namespace zeropg

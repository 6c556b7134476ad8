#include "backend/transport/shm/shared_segment.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "backend/diagnostics/format_ranks.h"
#include "backend/platform/cpu/waiter.h"
#include "backend/platform/memory/pages.h"
#include "backend/platform/memory/round_up.h"
#include "backend/platform/memory/sealed_memory.h"
#include "backend/platform/process/descriptor.h"
#include "backend/platform/process/futex.h"

namespace zeropg {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxRanks = 4096;
constexpr std::chrono::milliseconds kSleepLimit{10};  // then `check` runs

int64_t data_bytes(int32_t world_size, int64_t bytes_per_rank) {
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= kMaxRanks, "shared segment: world_size is ", world_size,
                    ", expected 1 to ", kMaxRanks);
  TORCH_CHECK_VALUE(bytes_per_rank >= 0 && bytes_per_rank < (int64_t{1} << 60) / world_size,
                    "shared segment: bytes_per_rank is ", bytes_per_rank, ", expected a size in bytes for each of ",
                    world_size, " ranks");
  return round_up(world_size * bytes_per_rank, kSmallPageBytes);
}

// A futex is 32 bits: the low half of a counter, which changes with the counter (short of a jump by 2^32).
uint32_t* futex_word(std::atomic<uint64_t>& counter) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<uint32_t*>(&counter);
}

}  // namespace

// Behind the data, [rank][counter]. `value` is written by its rank only; `waiters` is counted by whoever sleeps on it,
// and a waiter that is killed leaves it too high, which costs a system call per publish and nothing else.
struct alignas(64) SharedSegment::Counter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> waiters;
};

int SharedSegment::create(int32_t world_size, int64_t bytes_per_rank) {
  const int64_t bytes = data_bytes(world_size, bytes_per_rank);
  return create_sealed_memory("zeropg-segment", bytes + world_size * kCounters * static_cast<int64_t>(sizeof(Counter)));
}

SharedSegment::SharedSegment(int fd, int32_t rank, int32_t world_size, int64_t bytes_per_rank,
                             std::function<void(int32_t)> check)
    : rank_(rank), world_size_(world_size), bytes_per_rank_(bytes_per_rank), check_(std::move(check)) {
  static_assert(sizeof(Counter) == 64);
  const Descriptor owned(fd);
  const int64_t bytes = data_bytes(world_size, bytes_per_rank);
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < world_size);
  mapping_ =
      std::make_unique<SealedMapping>(fd, bytes + world_size * kCounters * static_cast<int64_t>(sizeof(Counter)));
  data_ = mapping_->data();
  populate(data_ + rank * bytes_per_rank, bytes_per_rank, "shared segment; make it smaller, or use more machines");
}

SharedSegment::~SharedSegment() = default;

SharedSegment::Counter& SharedSegment::counter(int32_t rank, int index) const {
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < world_size_ && index >= 0 && index < kCounters);
  auto* counters = reinterpret_cast<Counter*>(data_ + data_bytes(world_size_, bytes_per_rank_));
  return counters[static_cast<int64_t>(rank) * kCounters + index];
}

void SharedSegment::publish(int index, uint64_t value) {
  Counter& own = counter(rank_, index);
  TORCH_INTERNAL_ASSERT(value >= own.value.load(std::memory_order_relaxed), "counters only grow");
  own.value.store(value, std::memory_order_seq_cst);  // before the look at `waiters`: Note [Lost wake-ups]
  if (own.waiters.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(futex_word(own.value));
  }
}

void SharedSegment::note(int index, uint64_t value) {
  counter(rank_, index).value.store(value, std::memory_order_relaxed);
}

uint64_t SharedSegment::read(int32_t rank, int index) const {
  return counter(rank, index).value.load(std::memory_order_acquire);
}

// Returns at the deadline at the latest; the caller looks whether the counter got there.
void SharedSegment::wait_until(int32_t rank, int index, uint64_t value, Clock::time_point deadline) const {
  Counter& awaited = counter(rank, index);
  Waiter waiter(world_size_, kCallersPatience);
  while (awaited.value.load(std::memory_order_acquire) < value) {
    if (!waiter.should_sleep()) {
      waiter.pause();
      continue;
    }
    try {
      if (check_) check_(rank);
    } catch (const c10::DistBackendError&) {
      if (awaited.value.load(std::memory_order_acquire) >= value) return;  // it came, and left in good order
      throw;
    }
    const auto now = Clock::now();
    if (now >= deadline) return;
    awaited.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = awaited.value.load(std::memory_order_seq_cst);
    if (seen < value) {
      futex_wait(futex_word(awaited.value), static_cast<uint32_t>(seen),
                 std::min<std::chrono::nanoseconds>(kSleepLimit, deadline - now));
    }
    awaited.waiters.fetch_sub(1, std::memory_order_relaxed);
  }
}

void SharedSegment::wait(int32_t rank, int index, uint64_t value, std::chrono::milliseconds timeout,
                         const char* what) const {
  wait_until(rank, index, value, Clock::now() + timeout);
  if (read(rank, index) < value) throw_late(index, value, timeout, what, {rank});
}

void SharedSegment::wait_all(int index, uint64_t value, std::chrono::milliseconds timeout, const char* what) const {
  const auto deadline = Clock::now() + timeout;
  std::vector<int32_t> late;
  for (int32_t rank = 0; rank < world_size_; ++rank) {  // all have to come, so the order of waiting does not matter
    wait_until(rank, index, value, deadline);
  }
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    if (read(rank, index) < value) late.push_back(rank);
  }
  if (!late.empty()) throw_late(index, value, timeout, what, late);
}

void SharedSegment::throw_late(int index, uint64_t value, std::chrono::milliseconds timeout, const char* what,
                               const std::vector<int32_t>& ranks) const {
  std::string counts;
  for (const int32_t rank : ranks) counts.append(counts.empty() ? "" : ", ").append(std::to_string(read(rank, index)));
  C10_THROW_ERROR(DistBackendError,
                  c10::str("[zeropg rank ", rank_, "/", world_size_, "] ", what, ": ", format_ranks(ranks),
                           " late after ", timeout.count(), " ms (count ", counts, ", expected ", value,
                           "); look at what those ranks were doing, or raise the group's timeout"));
}

}  // namespace zeropg

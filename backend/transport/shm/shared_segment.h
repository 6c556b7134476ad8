// Memory that every rank of a group in one node maps, for owners who keep long-lived data there (the sharded module's
// parameter shards): rank r's part starts at data() + r * bytes_per_rank(), parts are contiguous, so the whole is one
// array.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace zeropg {

class SealedMapping;

class SharedSegment {
 public:
  static constexpr int kCounters = 8;  // per rank

  // Used by ProcessGroupZero::allocate_shared: makes the sealed memfd / maps it. Takes ownership of `fd`; the mapping
  // outlives it. The constructor brings this rank's own part into memory, so its pages lie near the rank's CPU and a
  // lack of memory is an error here, not a SIGBUS later.
  static int create(int32_t world_size, int64_t bytes_per_rank);
  // `check` is called now and then with the rank that is waited for; it throws when the group was aborted, a rank of it
  // failed, or that rank has left.
  SharedSegment(int fd, int32_t rank, int32_t world_size, int64_t bytes_per_rank, std::function<void(int32_t)> check);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes_per_rank() const { return bytes_per_rank_; }
  int32_t world_size() const { return world_size_; }
  int32_t rank() const { return rank_; }

  // Monotonic counters, one writer each (the rank itself). publish: release order, wakes waiters. read: acquire order.
  void publish(int counter, uint64_t value);
  // Any value, in a counter that nobody waits for: those who have seen a later `publish` of this rank read it.
  void note(int counter, uint64_t value);
  uint64_t read(int32_t rank, int counter) const;
  // Blocks until read(rank, counter) >= value for that rank / for every rank. Spins only when ranks <= usable CPUs,
  // then yields, then sleeps on a futex. Throws DistBackendError naming `what` and the late ranks after `timeout`. The
  // GIL must not be held.
  void wait(int32_t rank, int counter, uint64_t value, std::chrono::milliseconds timeout, const char* what) const;
  void wait_all(int counter, uint64_t value, std::chrono::milliseconds timeout, const char* what) const;

 private:
  struct Counter;
  Counter& counter(int32_t rank, int index) const;
  [[noreturn]] void throw_late(int index, uint64_t value, std::chrono::milliseconds timeout, const char* what,
                               const std::vector<int32_t>& ranks) const;
  void wait_until(int32_t rank, int index, uint64_t value, std::chrono::steady_clock::time_point deadline) const;

  int32_t rank_ = 0;
  int32_t world_size_ = 1;
  int64_t bytes_per_rank_ = 0;
  std::unique_ptr<SealedMapping> mapping_;
  std::byte* data_ = nullptr;
  std::function<void(int32_t)> check_;
};

}  // namespace zeropg

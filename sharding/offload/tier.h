// A tier: memory apart from the one that computes, for what is needed once per step (optimizer state, masters).
//
// Implementations: host memory (host_tier.h), a file on a local disk (file_tier.h). registry.h makes them by name.
// The contract that all of them keep is tests/sharding/offload/tier_suite.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <string_view>

#include "sharding/checkpoint/file_error.h"

namespace zeropg {

// An operation that the machine refused; OSError in Python. The text names the rank, the place, the operation and what
// to do; code() is EIO for data that is not what was written.
class TierError : public FileError {
 public:
  using FileError::FileError;
};

// A range of bytes that Tier::allocate has reserved. Plain data: copying one reserves nothing.
struct TierExtent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A read or write under way. The buffer belongs to the caller and must live and not be touched until wait() returns;
// who drops a Transfer without waiting waits in the destructor, and its error is lost.
class Transfer {
 public:
  Transfer() = default;  // one that is done
  explicit Transfer(std::future<void> done) : done_(std::move(done)) {}
  Transfer(Transfer&& other) noexcept = default;
  Transfer& operator=(Transfer&& other) noexcept;
  ~Transfer();
  // Returns when the bytes are there, or throws TierError. Later calls return at once.
  void wait();

 private:
  std::future<void> done_;
};

// Thread-safe. Reads and writes run in any order and at the same time, but for those whose bytes overlap, one of them
// writing: these run in the order in which they were asked for.
class Tier {
 public:
  virtual ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  const std::string& name() const { return name_; }
  // Of the offsets and lengths of transfers and of the addresses of their buffers: a power of two.
  uint64_t alignment() const { return alignment_; }
  uint64_t reserved_bytes() const { return reserved_bytes_; }

  // Reserves `bytes`, rounded up to the alignment, that read as zeros. Once it has returned, writes within it do not
  // fail for want of space. `what` is for messages. TierError where there is no room.
  TierExtent allocate(uint64_t bytes, std::string_view what);
  void free(const TierExtent& extent);  // no transfer of it may be under way

  // Moves bytes between `buffer` and [offset, offset + buffer.size()) of the extent. ValueError where that leaves the
  // extent or is not aligned.
  Transfer read(const TierExtent& extent, uint64_t offset, std::span<std::byte> buffer);
  Transfer write(const TierExtent& extent, uint64_t offset, std::span<const std::byte> buffer);

  // The extent's bytes, where the CPU may use them in place instead of moving them; null elsewhere.
  virtual std::byte* address(const TierExtent& extent) = 0;
  // For people: "/nvme (O_DIRECT, 4 threads)".
  virtual std::string describe() const = 0;

 protected:
  Tier(std::string name, uint64_t alignment) : name_(std::move(name)), alignment_(alignment) {}

 private:
  // As the public functions, with arguments that have been checked and rounded.
  virtual TierExtent reserve(uint64_t bytes, std::string_view what) = 0;
  virtual void release(const TierExtent& extent) = 0;
  virtual Transfer start_read(uint64_t offset, std::span<std::byte> buffer) = 0;
  virtual Transfer start_write(uint64_t offset, std::span<const std::byte> buffer) = 0;
  void check(const TierExtent& extent, uint64_t offset, const void* address, uint64_t bytes) const;

  const std::string name_;
  const uint64_t alignment_;
  std::atomic<uint64_t> reserved_bytes_{0};
};

}  // namespace zeropg

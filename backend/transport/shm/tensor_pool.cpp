#include "backend/transport/shm/tensor_pool.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

#include "backend/platform/cpu/cgroup.h"
#include "backend/platform/memory/pages.h"
#include "backend/platform/memory/round_up.h"
#include "backend/platform/memory/sealed_memory.h"

namespace zeropg {
namespace {

constexpr int64_t kMaxPoolBytes = int64_t{1} << 44;  // of all ranks; a process has 2^47 bytes of addresses
constexpr int64_t kPopulateBytes = int64_t{256} << 10;
constexpr int64_t kNothing = 1;  // a memfd must have some bytes

// In front of a block that several ranks hold: how many still do.
std::atomic<int32_t>& holders_of(std::byte* block) {
  static_assert(std::atomic<int32_t>::is_always_lock_free);
  return *reinterpret_cast<std::atomic<int32_t>*>(block - TensorPool::kHeaderBytes);
}

int64_t size_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    C10_THROW_ERROR(DistBackendError, c10::str("tensor pool: fstat: ", std::strerror(errno)));
  }
  return status.st_size;
}

}  // namespace

int64_t TensorPool::share_of_memory(int32_t world_size) {
  int64_t bytes = std::min(memory_limit_bytes(), kMaxPoolBytes);
  rlimit addresses{};
  if (::getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY) {
    bytes = std::min(bytes, static_cast<int64_t>(addresses.rlim_cur / 4));  // the rest has to fit too
  }
  const int64_t share = bytes / world_size;
  return share / kBigPageBytes * kBigPageBytes;
}

int TensorPool::create(int32_t world_size, int64_t bytes_per_rank) {
  TORCH_CHECK_VALUE(bytes_per_rank >= 0 && bytes_per_rank <= kMaxPoolBytes / world_size,
                    "tensor pool: ", bytes_per_rank, " bytes for each of ", world_size, " ranks, expected 0 to ",
                    kMaxPoolBytes / world_size);
  const int64_t part = round_up(bytes_per_rank, kSmallPageBytes);
  return create_sealed_memory("zeropg-tensors", std::max(kNothing, part * world_size));
}

TensorPool::TensorPool(int fd, int32_t rank, int32_t world_size)
    : mapping_(std::make_unique<SealedMapping>(fd, size_of(fd))),
      rank_(rank),
      world_size_(world_size),
      owner_(::getpid()) {
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < world_size);
  bytes_per_rank_ = mapping_->size_bytes() / world_size / kSmallPageBytes * kSmallPageBytes;
  part_ = mapping_->data() + rank * bytes_per_rank_;
}

TensorPool::~TensorPool() = default;

std::byte* TensorPool::allocate(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocate_locked(bytes);
}

std::byte* TensorPool::allocate_held(int64_t bytes, int32_t holders) {
  TORCH_INTERNAL_ASSERT(holders > 0 && bytes >= 0);
  std::lock_guard<std::mutex> lock(mutex_);
  std::byte* block = allocate_locked(bytes + kHeaderBytes);
  held_.push_back(block - part_);
  new (block) std::atomic<int32_t>(holders);
  return block + kHeaderBytes;
}

void TensorPool::let_go(std::byte* block) const {
  if (::getpid() == owner_) {
    holders_of(block).fetch_sub(1, std::memory_order_acq_rel);
  }
}

void TensorPool::let_all_go(std::byte* block) const {
  if (::getpid() == owner_) {
    holders_of(block).store(0, std::memory_order_release);
  }
}

void TensorPool::free_what_nobody_holds() {
  std::erase_if(held_, [&](int64_t offset) {
    const bool is_free = holders_of(part_ + offset + kHeaderBytes).load(std::memory_order_acquire) == 0;
    if (is_free) {
      free_locked(offset);
    }
    return is_free;
  });
}

std::byte* TensorPool::allocate_locked(int64_t bytes) {
  free_what_nobody_holds();
  TORCH_CHECK_VALUE(bytes >= 0, "tensor pool: cannot allocate ", bytes, " bytes");
  TORCH_CHECK_WITH(DistBackendError, bytes <= bytes_per_rank_, "the tensor pool has ", bytes_per_rank_,
                   " bytes for each rank, less than the ", bytes,
                   " that are asked for; "
                   "raise BackendOptions(pool_bytes=...), or use an ordinary tensor");
  const int64_t size = round_up(std::max<int64_t>(bytes, 1), kAlignment);
  int64_t offset = take_free(size);
  if (offset < 0) {
    offset = extend(size);
  }
  used_[offset] = size;
  return part_ + offset;
}

// The smallest free block that is large enough; -1: none is.
int64_t TensorPool::take_free(int64_t bytes) {
  const auto best = free_by_size_.lower_bound({bytes, 0});
  if (best == free_by_size_.end()) {
    return -1;
  }
  const auto [size, offset] = *best;
  remove_free(free_.find(offset));
  if (size > bytes) {
    add_free(offset + bytes, size - bytes);
  }
  return offset;
}

// A block at the end of what was ever used, with the free block that lies there.
int64_t TensorPool::extend(int64_t bytes) {
  int64_t offset = end_;
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  if (last != free_.end() && last->first + last->second == end_) {
    offset = last->first;
  }
  TORCH_CHECK_WITH(DistBackendError, bytes <= bytes_per_rank_ - offset, "the tensor pool has ", bytes_per_rank_,
                   " bytes for each rank, and no ", bytes,
                   " of them in one piece are free; drop tensors, or raise "
                   "BackendOptions(pool_bytes=...)");
  if (offset + bytes > populated_) {
    const int64_t wanted = std::min(bytes_per_rank_, round_up(offset + bytes, kPopulateBytes)) - populated_;
    // The kernel would rather kill a process of the control group than refuse pages.
    const int64_t available = memory_available_bytes();
    TORCH_CHECK_WITH(DistBackendError, wanted <= available, "no memory for ", bytes,
                     " more bytes of tensors: ", available,
                     " are available on this machine or in its control group; use smaller tensors, or "
                     "more machines");
    populate(part_ + populated_, wanted, "tensors in shared memory; use smaller ones, or more machines");
    populated_ += wanted;
  }
  if (offset != end_) {
    remove_free(last);
  }
  end_ = offset + bytes;
  return offset;
}

void TensorPool::free(std::byte* block) {
  if (::getpid() != owner_) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  free_locked(block - part_);
}

void TensorPool::free_locked(int64_t block) {
  const auto used = used_.find(block);
  TORCH_INTERNAL_ASSERT(used != used_.end(), "not a block of this pool");
  int64_t offset = used->first;
  int64_t bytes = used->second;
  used_.erase(used);
  const auto next = free_.find(offset + bytes);
  if (next != free_.end()) {
    bytes += next->second;
    remove_free(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_free(before);
    }
  }
  add_free(offset, bytes);
}

void TensorPool::add_free(int64_t offset, int64_t bytes) {
  free_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void TensorPool::remove_free(std::map<int64_t, int64_t>::iterator block) {
  free_by_size_.erase({block->second, block->first});
  free_.erase(block);
}

int64_t TensorPool::offset_of(const std::byte* data, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(part_);
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto size = static_cast<uintptr_t>(bytes_per_rank_);
  if (address < begin || address - begin > size || static_cast<uintptr_t>(bytes) > size - (address - begin)) {
    return -1;
  }
  return static_cast<int64_t>(address - begin);
}

std::byte* TensorPool::at(int32_t rank, int64_t offset, int64_t bytes) const {
  if (rank < 0 || rank >= world_size_ || offset < 0 || bytes < 0 || offset > bytes_per_rank_ ||
      bytes > bytes_per_rank_ - offset) {
    return nullptr;
  }
  return mapping_->data() + rank * bytes_per_rank_ + offset;
}

int64_t TensorPool::populated_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return populated_;
}

}  // namespace zeropg

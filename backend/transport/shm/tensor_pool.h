// Shared memory that the tensors of a group lie in, so that a collective can read and write them where they are.
//
// One sealed memfd for the ranks of the group on a node, a part for each of them, mapped by all when the group is made.
// A rank allocates from its own part alone, without a word to the others; that a tensor lies there they learn from the
// announcement of an operation. The parts are as large as the memory of the machine may ever allow, since pages come
// into being only when a block needs them; they stay with the pool, for the next block.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace zeropg {

class SealedMapping;

class TensorPool {
 public:
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t kHeaderBytes = kAlignment;  // in front of a block that several ranks hold

  // What each of `world_size` ranks gets when nobody says: its share of the memory that this process may use.
  static int64_t share_of_memory(int32_t world_size);

  // Makes the memfd. `bytes_per_rank` is rounded up to pages; 0: a pool that has no memory. DistBackendError.
  static int create(int32_t world_size, int64_t bytes_per_rank);

  // Maps it; `fd` may be closed afterwards. Refuses a descriptor whose size or seals are wrong. DistBackendError.
  TensorPool(int fd, int32_t rank, int32_t world_size);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  int64_t bytes_per_rank() const { return bytes_per_rank_; }

  // A block of this rank's part, aligned to kAlignment, its pages in memory, its contents undefined. Any thread.
  // DistBackendError when the part, or the machine, has no room for it.
  std::byte* allocate(int64_t bytes);
  // Of a block that allocate() gave. Does nothing in a forked child, which the pool does not belong to.
  void free(std::byte* block);

  // As allocate(), a block that `holders` ranks of the node use, this one among them, each until it lets go. What the
  // last of them has let go of is freed by this rank's next allocation.
  std::byte* allocate_held(int64_t bytes, int32_t holders);
  // Of such a block, in whoever's part; by all of its holders at once, for its owner. Both do nothing in a forked
  // child.
  void let_go(std::byte* block) const;
  void let_all_go(std::byte* block) const;

  // Where [data, data + bytes) lies in this rank's part; -1: not there.
  int64_t offset_of(const std::byte* data, int64_t bytes) const;
  // The bytes at `offset` in the part of `rank`; nullptr where they would not all be in it, whoever said so.
  std::byte* at(int32_t rank, int64_t offset, int64_t bytes) const;

  int64_t populated_bytes() const;  // of this rank's part

 private:
  std::byte* allocate_locked(int64_t bytes);
  void free_locked(int64_t offset);
  void free_what_nobody_holds();
  int64_t take_free(int64_t bytes);
  int64_t extend(int64_t bytes);
  void add_free(int64_t offset, int64_t bytes);
  void remove_free(std::map<int64_t, int64_t>::iterator block);

  std::unique_ptr<SealedMapping> mapping_;
  const int32_t rank_;
  const int32_t world_size_;
  const pid_t owner_;
  int64_t bytes_per_rank_ = 0;
  std::byte* part_ = nullptr;

  // Blocks lie below end_; free ones, all of them populated and no two of them neighbours, are in both indices.
  mutable std::mutex mutex_;
  int64_t end_ = 0;                                     // guarded by mutex_, as is all that follows
  int64_t populated_ = 0;                               // bytes from the start of the part
  std::unordered_map<int64_t, int64_t> used_;           // by offset
  std::map<int64_t, int64_t> free_;                     // by offset
  std::set<std::pair<int64_t, int64_t>> free_by_size_;  // (bytes, offset)
  std::vector<int64_t> held_;                           // offsets of the blocks of allocate_held
};

}  // namespace zeropg

// Reads the tensors of other ranks of the node where they lie, for collectives of tensors that are in no shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/transport/shm/cma.h"

namespace zeropg {

// Ranks are places on the node. One thread at a time.
class CmaPeers {
 public:
  explicit CmaPeers(int32_t node_size) : readers_(static_cast<size_t>(node_size)) {}

  // Tries to read the memory of another rank, unless that was tried; says why it does not work.
  const std::string& meet(int32_t rank, const CmaIdentity& identity);
  // Whether the memory of every other rank was tried and can be read.
  bool reads_all() const { return usable_ + 1 == static_cast<int32_t>(readers_.size()); }
  // "", or why it failed: then that rank is not read again, and what lies in `into` is undefined.
  std::string read(int32_t rank, uint64_t address, std::span<std::byte> into);
  // Of a rank that could be read: whether its process has ended since.
  bool is_gone(int32_t rank) const { return readers_.at(static_cast<size_t>(rank)).value().is_gone(); }

 private:
  int32_t usable_ = 0;
  std::vector<std::optional<CmaReader>> readers_;
};

// Tells the user, once in a process, that and why large messages inside the node take a slower way.
void say_unreadable(int32_t rank, int32_t world_size, int32_t peer, const std::string& refusal);

}  // namespace zeropg

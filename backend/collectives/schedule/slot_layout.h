// Where the parts of a chunk (chunk_layout.h) lie in the staging slots of a node's ranks.
//
// Note [Groups of parts]
// A message between nodes costs the CPU some ten microseconds whatever its length, so a chunk grows with the number of
// ranks, among whom it is cut. A slot then holds only some of its parts: these go through it in groups, each in a bank
// and between two barriers of its own, as chunks do where a slot holds all parts. A chunk has an odd number of groups
// (one of them may be empty), so that the first one of the next chunk comes to the other bank, as its regions demand.
// Groups begin behind the own node's part, as messages do, so that not all nodes send to the same one at once; each
// node has groups of its own, which nobody else sees.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

class SlotLayout {
 public:
  // All parts at their places, for chunks that a slot holds.
  explicit SlotLayout(const ChunkLayout& layout);
  // As many parts in a group as `slot_bytes` hold. Throws std::invalid_argument where they do not hold the longest.
  SlotLayout(const Placement& placement, const ChunkLayout& layout, int64_t slot_bytes);

  int32_t group_count() const { return static_cast<int32_t>(groups_.size()); }
  const std::vector<int32_t>& parts(int32_t group) const { return groups_[group]; }
  int32_t group_of(int32_t part) const { return group_of_[part]; }
  // Of the other nodes whose parts are in a group, in the order in which messages go to them.
  std::vector<int32_t> other_nodes(const Placement& placement, int32_t group) const;
  Region staged(int32_t rank, int32_t part, int64_t place) const;  // in the slot of that rank

 private:
  const ChunkLayout& layout_;  // must outlive this object
  std::vector<std::vector<int32_t>> groups_;
  std::vector<int32_t> group_of_;  // by part, as the next
  std::vector<int64_t> offsets_;   // in the slot
};

// How many groups a chunk of that many parts has, the longest of `part_bytes`.
int32_t group_count(int32_t part_count, int64_t part_bytes, int64_t slot_bytes);

}  // namespace zeropg

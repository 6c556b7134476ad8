#include "backend/collectives/schedule/slot_layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

int32_t parts_in_group(int32_t part_count, int32_t groups) { return (part_count + groups - 1) / groups; }

}  // namespace

int32_t group_count(int32_t parts, int64_t part_bytes, int64_t slot_bytes) {
  const int64_t together = part_bytes == 0 ? parts : std::min<int64_t>(parts, slot_bytes / part_bytes);
  if (together < 1) {
    throw std::invalid_argument("a part of " + std::to_string(part_bytes) + " bytes does not fit a staging slot of " +
                                std::to_string(slot_bytes));
  }
  const auto groups = static_cast<int32_t>(part_count(parts, together));
  return groups % 2 == 0 ? groups + 1 : groups;
}

SlotLayout::SlotLayout(const ChunkLayout& layout) : layout_(layout), groups_(1), group_of_(layout.part_count(), 0) {
  groups_[0].resize(layout.part_count());
  std::iota(groups_[0].begin(), groups_[0].end(), 0);
  for (int32_t part = 0; part < layout.part_count(); ++part) offsets_.push_back(layout.part(part).offset_bytes);
}

SlotLayout::SlotLayout(const Placement& placement, const ChunkLayout& layout, int64_t slot_bytes) : SlotLayout(layout) {
  const int32_t parts = layout.part_count();
  const Range last = layout.part(parts - 1);
  if (last.offset_bytes + last.bytes <= slot_bytes) return;
  int64_t longest = 0;
  for (int32_t part = 0; part < parts; ++part) longest = std::max(longest, layout.part(part).bytes);
  const int32_t groups = zeropg::group_count(parts, longest, slot_bytes);
  const int32_t together = parts_in_group(parts, groups);
  groups_.assign(groups, {});
  for (int32_t i = 0; i < parts; ++i) {
    const int32_t part = (placement.node() + 1 + i) % parts;
    group_of_[part] = i / together;
    offsets_[part] = i % together * longest;
    groups_[i / together].push_back(part);
  }
}

std::vector<int32_t> SlotLayout::other_nodes(const Placement& placement, int32_t group) const {
  std::vector<int32_t> nodes;
  for (const int32_t node : placement.other_nodes()) {
    if (group_of_[layout_.part_of_node(node)] == group) nodes.push_back(node);
  }
  return nodes;
}

Region SlotLayout::staged(int32_t rank, int32_t part, int64_t place) const {
  return staging(rank, group_of_[part], offsets_[part] + place - layout_.part(part).offset_bytes);
}

}  // namespace zeropg

#include "backend/collectives/schedule/chunk_layout.h"

#include <algorithm>

namespace zeropg {

Range overlap(Range a, Range b) {
  const int64_t begin = std::max(a.offset_bytes, b.offset_bytes);
  const int64_t end = std::min(a.offset_bytes + a.bytes, b.offset_bytes + b.bytes);
  return {begin, std::max<int64_t>(0, end - begin)};
}

std::vector<Extent> cut(const std::vector<Extent>& extents, Range places) {
  std::vector<Extent> pieces;
  const auto ends_before = [](const Extent& extent, int64_t place) {
    return extent.places.offset_bytes + extent.places.bytes <= place;
  };
  auto extent = std::lower_bound(extents.begin(), extents.end(), places.offset_bytes, ends_before);
  for (; extent != extents.end() && extent->places.offset_bytes < places.offset_bytes + places.bytes; ++extent) {
    const Range piece = overlap(extent->places, places);
    if (piece.bytes == 0) continue;
    const int64_t before = piece.offset_bytes - extent->places.offset_bytes;
    pieces.push_back({.places = piece,
                      .last_bytes = std::clamp<int64_t>(extent->last_bytes - before, 0, piece.bytes),
                      .tensor = advance(extent->tensor, before)});
  }
  return pieces;
}

Region tensor_at(const std::vector<Extent>& extents, int64_t place) { return cut(extents, {place, 1}).at(0).tensor; }

// By rounded sums of shares, so that no part is longer than its share, rounded up.
std::vector<Range> parts_by_shares(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment) {
  check_shares(spec);
  const int32_t nodes = node_count(spec);
  std::vector<Range> parts;
  int64_t begin = 0;
  int64_t share = 0;
  for (int32_t node = 0; node < nodes; ++node) {
    if (spec.node_shares.empty()) {
      parts.push_back(equal_part_of(chunk_bytes, nodes, alignment, node));
      continue;
    }
    share += spec.node_shares[node];
    const int64_t end = chunk_bytes / alignment * share / kWholeShare * alignment;
    parts.push_back({begin, end - begin});
    begin = end;
  }
  return parts;
}

int64_t longest_chunk_bytes(const CollectiveSpec& spec, int64_t part_bytes, int64_t alignment) {
  if (spec.node_shares.empty()) return part_bytes * node_count(spec);
  check_shares(spec);
  const int32_t largest = *std::max_element(spec.node_shares.begin(), spec.node_shares.end());
  return part_bytes / alignment * kWholeShare / largest * alignment;
}

ChunkLayout ChunkLayout::of_parts(const Placement& placement, std::vector<Range> parts, int64_t alignment) {
  return {placement, std::move(parts), alignment};
}

ChunkLayout ChunkLayout::of_equal_parts(const Placement& placement, int64_t chunk_bytes, int64_t alignment) {
  std::vector<Range> parts;
  for (int32_t node = 0; node < placement.node_count(); ++node) {
    parts.push_back(equal_part_of(chunk_bytes, placement.node_count(), alignment, node));
  }
  return {placement, std::move(parts), alignment};
}

ChunkLayout ChunkLayout::of_one_part(const Placement& placement, int64_t chunk_bytes, int64_t alignment) {
  return {placement, {{0, chunk_bytes}}, alignment};
}

ChunkLayout ChunkLayout::of_blocks(const Placement& placement, int64_t piece_bytes, int64_t alignment) {
  std::vector<Range> parts;
  int64_t begin = 0;
  for (int32_t node = 0; node < placement.node_count(); ++node) {
    parts.push_back({begin, placement.node_size(node) * piece_bytes});
    begin += parts.back().bytes;
  }
  return {placement, std::move(parts), alignment};
}

Range ChunkLayout::slice(int32_t part, int32_t node, int32_t local_rank) const {
  Range slice = equal_part_of(parts_[part].bytes, placement_->node_size(node), alignment_, local_rank);
  slice.offset_bytes += parts_[part].offset_bytes;
  return slice;
}

std::vector<PeerPlaces> ChunkLayout::peers_at(int32_t part, int32_t node, Range places) const {
  std::vector<PeerPlaces> peers;
  for (int32_t peer = 0; peer < placement_->node_size(node); ++peer) {
    const Range common = overlap(places, slice(part, node, peer));
    if (common.bytes > 0) peers.push_back({placement_->rank_at(node, peer), common});
  }
  return peers;
}

int64_t ChunkLayout::largest_own_slice_bytes() const {
  int64_t largest = 0;
  for (int32_t part = 0; part < part_count(); ++part) largest = std::max(largest, own_slice(part).bytes);
  return largest;
}

std::vector<Extent> extents_of_range(Region tensor, const Chunks& chunks) {
  return {{{0, chunks.bytes}, chunks.last_bytes, with_stride(tensor, chunks.bytes)}};
}

std::vector<Extent> extents_of_blocks(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout,
                                      const Chunks& pieces, RegionOfBlock block) {
  std::vector<Extent> extents;
  extents.reserve(static_cast<size_t>(spec.world_size));
  for (int32_t node = 0; node < placement.node_count(); ++node) {
    for (int32_t local_rank = 0; local_rank < placement.node_size(node); ++local_rank) {
      const int64_t place = layout.slice(node, node, local_rank).offset_bytes;
      const Region first = block(spec, placement.rank_at(node, local_rank), 0);
      extents.push_back({{place, pieces.bytes}, pieces.last_bytes, with_stride(first, pieces.bytes)});
    }
  }
  return extents;
}

}  // namespace zeropg

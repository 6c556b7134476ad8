// How a chunk is divided among nodes and their ranks.
//
// A chunk is a row of places, one per byte. It is cut into parts: part j is completed on node j (or there is one part
// that every node completes). Each node divides each part into slices, one for each of its ranks: that rank alone
// handles those places there. Nodes of different sizes cut the same part differently; what a rank sends to another node
// is then its slice's overlap with each slice there, so that every byte goes to another node exactly once, and all
// ranks of all nodes take part.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

// Bytes of the caller's tensors and the places they have in a chunk.
struct Extent {
  Range places;
  int64_t last_bytes;  // of the last chunk, from the first place on
  Region tensor;       // of the first place

  StepBytes bytes() const { return {places.bytes, last_bytes}; }
};
// The pieces of `extents` (ascending) that lie in `places`.
std::vector<Extent> cut(const std::vector<Extent>& extents, Range places);
Region tensor_at(const std::vector<Extent>& extents, int64_t place);  // a place that one of them has
Range overlap(Range a, Range b);

using RegionOfPlace = std::function<Region(int64_t place)>;

// Chunks with a part for each node, in proportion to CollectiveSpec::node_shares (equal ones without; a part may be
// empty). All lengths are multiples of `alignment`.
std::vector<Range> parts_by_shares(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment);
// The longest chunk whose parts have at most `part_bytes`.
int64_t longest_chunk_bytes(const CollectiveSpec& spec, int64_t part_bytes, int64_t alignment);

// Places of a chunk that one rank of another node handles there.
struct PeerPlaces {
  int32_t rank;
  Range places;
};

class ChunkLayout {
 public:
  // One part for each node, equal, `chunk_bytes` together.
  static ChunkLayout of_equal_parts(const Placement& placement, int64_t chunk_bytes, int64_t alignment);
  // These parts, one behind the other.
  static ChunkLayout of_parts(const Placement& placement, std::vector<Range> parts, int64_t alignment);
  // One part that every node completes.
  static ChunkLayout of_one_part(const Placement& placement, int64_t chunk_bytes, int64_t alignment);
  // A part holds `piece_bytes` of the block of each rank of its node, in the node's order.
  static ChunkLayout of_blocks(const Placement& placement, int64_t piece_bytes, int64_t alignment);

  int32_t part_count() const { return static_cast<int32_t>(parts_.size()); }
  int32_t part_of_node(int32_t node) const { return part_count() == 1 ? 0 : node; }
  Range part(int32_t part) const { return parts_[part]; }
  // A shorter last chunk has the same slices, with fewer bytes in them.
  Range slice(int32_t part, int32_t node, int32_t local_rank) const;
  Range own_slice(int32_t part) const { return slice(part, placement_->node(), placement_->local_rank()); }
  int64_t largest_own_slice_bytes() const;
  // Who of a node handles these places of a part, in the order of places.
  std::vector<PeerPlaces> peers_at(int32_t part, int32_t node, Range places) const;

 private:
  ChunkLayout(const Placement& placement, std::vector<Range> parts, int64_t alignment)
      : placement_(&placement), parts_(std::move(parts)), alignment_(alignment) {}

  const Placement* placement_;  // must outlive the layout
  std::vector<Range> parts_;
  int64_t alignment_;
};

// The extents of a loop's chunks: of a contiguous range of one tensor, or of a piece of every rank's block, of which
// `pieces` are the chunks.
std::vector<Extent> extents_of_range(Region tensor, const Chunks& chunks);
using RegionOfBlock = Region (*)(const CollectiveSpec&, int32_t rank, int64_t offset_bytes);  // input_, output_block
std::vector<Extent> extents_of_blocks(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout,
                                      const Chunks& pieces, RegionOfBlock block);

}  // namespace zeropg

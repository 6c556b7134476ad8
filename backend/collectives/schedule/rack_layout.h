// How a chunk is divided among racks, their nodes and ranks.
//
// In each rack every place has a keeper: the node that adds what the nodes of the rack have, and that the others get
// the result from. A rack's nodes keep equal ranges of the chunk. Racks of different sizes are cut at different places;
// the pieces between all these cuts have one keeper in each rack. A piece is a part of ChunkLayout, sliced among the
// ranks of a node as there. Zones divide it once more: each lies in one slice of each keeper, and is completed in one
// rack, each rack as much as any other.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/placement.h"

namespace zeropg {

// By rack: a node of it.
using Keepers = std::vector<int32_t>;

struct RackPiece {
  Range places;
  Keepers keepers;
};
std::vector<RackPiece> rack_pieces(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment);

struct RackZone {
  Range places;
  int32_t rack;  // that completes it
};

class RackLayout {
 public:
  // Throws std::invalid_argument where the racks do not hold every node once. `placement` must outlive this object.
  RackLayout(const CollectiveSpec& spec, const Placement& placement, int64_t chunk_bytes, int64_t alignment);

  const ChunkLayout& chunk() const { return chunk_; }
  const std::vector<RackPiece>& pieces() const { return pieces_; }
  int32_t rack_count() const { return static_cast<int32_t>(racks_.size()); }

  // Of the specification's own rank.
  int32_t rack() const { return rack_; }
  const std::vector<int32_t>& nodes() const { return racks_[rack_]; }  // of the own rack, in order
  const std::vector<int32_t>& kept_pieces() const { return kept_pieces_; }
  int32_t own_keeper(int32_t piece) const { return pieces_[piece].keepers[rack_]; }
  // What of a kept piece is in the own slice, in the order of places.
  const std::vector<RackZone>& own_zones(int32_t piece) const { return own_zones_[piece]; }

 private:
  std::vector<RackZone> zones_in_own_slice(int32_t piece) const;

  const Placement& placement_;
  const int64_t alignment_;
  std::vector<std::vector<int32_t>> racks_;
  std::vector<RackPiece> pieces_;
  ChunkLayout chunk_;
  int32_t rack_ = 0;
  std::vector<int32_t> kept_pieces_;
  std::vector<std::vector<RackZone>> own_zones_;  // by piece; of kept ones
};

}  // namespace zeropg

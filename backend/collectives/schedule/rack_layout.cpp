#include "backend/collectives/schedule/rack_layout.h"

#include <iterator>
#include <set>

namespace zeropg {

namespace {

std::vector<Range> between_cuts(const std::set<int64_t>& cuts) {
  std::vector<Range> ranges;
  for (auto cut = cuts.begin(); cut != cuts.end() && std::next(cut) != cuts.end(); ++cut) {
    ranges.push_back({*cut, *std::next(cut) - *cut});
  }
  return ranges;
}

int32_t owner_at(int64_t place, int64_t chunk_bytes, int32_t count, int64_t alignment) {
  for (int32_t owner = 0; owner < count; ++owner) {
    if (overlap(equal_part_of(chunk_bytes, count, alignment, owner), {place, 1}).bytes > 0) return owner;
  }
  return 0;
}

std::vector<Range> places_of(const std::vector<RackPiece>& pieces) {
  std::vector<Range> places;
  for (const RackPiece& piece : pieces) places.push_back(piece.places);
  return places;
}

}  // namespace

std::vector<RackPiece> rack_pieces(const CollectiveSpec& spec, int64_t chunk_bytes, int64_t alignment) {
  std::set<int64_t> cuts{0, chunk_bytes};
  for (const std::vector<int32_t>& rack : spec.racks) {
    const auto nodes = static_cast<int32_t>(rack.size());
    for (int32_t i = 1; i < nodes; ++i) cuts.insert(equal_part_of(chunk_bytes, nodes, alignment, i).offset_bytes);
  }
  std::vector<RackPiece> pieces;
  for (const Range& places : between_cuts(cuts)) {
    pieces.push_back({.places = places, .keepers = {}});
    for (const std::vector<int32_t>& rack : spec.racks) {
      const auto nodes = static_cast<int32_t>(rack.size());
      pieces.back().keepers.push_back(rack[owner_at(places.offset_bytes, chunk_bytes, nodes, alignment)]);
    }
  }
  return pieces;
}

RackLayout::RackLayout(const CollectiveSpec& spec, const Placement& placement, int64_t chunk_bytes, int64_t alignment)
    : placement_(placement),
      alignment_(alignment),
      racks_(spec.racks),
      pieces_(rack_pieces(spec, chunk_bytes, alignment)),
      chunk_(ChunkLayout::of_parts(placement, places_of(pieces_), alignment)),
      rack_(rack_of_nodes(spec)[placement.node()]),
      own_zones_(pieces_.size()) {
  for (int32_t piece = 0; piece < static_cast<int32_t>(pieces_.size()); ++piece) {
    if (own_keeper(piece) != placement.node()) continue;
    kept_pieces_.push_back(piece);
    own_zones_[piece] = zones_in_own_slice(piece);
  }
}

std::vector<RackZone> RackLayout::zones_in_own_slice(int32_t piece) const {
  const Range own = chunk_.own_slice(piece);
  std::set<int64_t> cuts{own.offset_bytes, own.offset_bytes + own.bytes};
  for (const int32_t keeper : pieces_[piece].keepers) {
    for (int32_t local_rank = 0; local_rank < placement_.node_size(keeper); ++local_rank) {
      const Range common = overlap(own, chunk_.slice(piece, keeper, local_rank));
      if (common.bytes > 0) cuts.insert({common.offset_bytes, common.offset_bytes + common.bytes});
    }
  }
  std::vector<RackZone> zones;
  for (const Range& atom : between_cuts(cuts)) {
    for (int32_t rack = 0; rack < rack_count(); ++rack) {
      Range zone = equal_part_of(atom.bytes, rack_count(), alignment_, rack);
      zone.offset_bytes += atom.offset_bytes;
      if (zone.bytes > 0) zones.push_back({zone, rack});
    }
  }
  return zones;
}

}  // namespace zeropg

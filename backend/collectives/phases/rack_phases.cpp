#include "backend/collectives/phases/rack_phases.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

// Scratch for own slices of kept pieces: sums and results for two chunks each, then what comes in.
constexpr int64_t kSums = 0;
constexpr int64_t kResults = 2;
constexpr int64_t kIncoming = 4;

int64_t whole_lines(int64_t bytes) { return part_count(bytes, kCacheLineBytes) * kCacheLineBytes; }

}  // namespace

RackPhases::RackPhases(const Placement& placement, const RackLayout& layout, const std::vector<Extent>& extents)
    : placement_(placement),
      layout_(layout),
      extents_(extents),
      slice_bytes_(whole_lines(layout.chunk().largest_own_slice_bytes())),
      other_nodes_(layout.nodes()) {
  std::rotate(other_nodes_.begin(), std::find(other_nodes_.begin(), other_nodes_.end(), placement.node()),
              other_nodes_.end());
  other_nodes_.erase(other_nodes_.begin());
  for (int32_t distance = 1; distance < layout.rack_count(); ++distance) {
    other_racks_.push_back((layout.rack() + distance) % layout.rack_count());
  }
}

// In own slices: those of all pieces, and of kept ones sums, results, and what comes in from each node or rack.
int64_t RackPhases::scratch_bytes() const {
  const auto sources = std::max(layout_.nodes().size(), static_cast<size_t>(layout_.rack_count()));
  const auto pieces = static_cast<int64_t>(layout_.pieces().size());
  const auto kept_pieces = static_cast<int64_t>(layout_.kept_pieces().size());
  return (2 * pieces + (kIncoming + static_cast<int64_t>(sources)) * kept_pieces) * slice_bytes_;
}

Region RackPhases::partial(int32_t piece, int64_t place) const {
  const int64_t in_slice = place - layout_.chunk().own_slice(piece).offset_bytes;
  return {.space = Space::kScratch,
          .offset_bytes = piece * slice_bytes_ + in_slice,
          .stride_bytes = static_cast<int64_t>(layout_.pieces().size()) * slice_bytes_};
}

Region RackPhases::kept(int64_t slot, int32_t piece, int64_t place) const {
  const auto pieces = static_cast<int64_t>(layout_.pieces().size());
  const auto kept_pieces = static_cast<int64_t>(layout_.kept_pieces().size());
  const int64_t slice = 2 * pieces + slot * kept_pieces + piece - layout_.kept_pieces().front();
  const int64_t in_slice = place - layout_.chunk().own_slice(piece).offset_bytes;
  return {.space = Space::kScratch, .offset_bytes = slice * slice_bytes_ + in_slice};
}

Region RackPhases::sum(int32_t piece, int64_t place) const {
  const auto stride = static_cast<int64_t>(layout_.kept_pieces().size()) * slice_bytes_;
  return with_stride(kept(kSums, piece, place), stride);
}

Region RackPhases::result(int32_t piece, int64_t place) const {
  const auto stride = static_cast<int64_t>(layout_.kept_pieces().size()) * slice_bytes_;
  return with_stride(kept(kResults, piece, place), stride);
}

// What nodes of the rack sent is added before anything of racks comes in.
Region RackPhases::incoming(size_t source, int32_t piece, int64_t place) const {
  return kept(kIncoming + static_cast<int64_t>(source), piece, place);
}

RackPhases::NodeOfPiece RackPhases::keeper_in(int32_t rack) const {
  return [this, rack](int32_t piece) { return layout_.pieces()[piece].keepers[rack]; };
}

RackPhases::Zones RackPhases::own_slices(int32_t keeper) const {
  Zones slices;
  for (int32_t piece = 0; piece < static_cast<int32_t>(layout_.pieces().size()); ++piece) {
    if (layout_.own_keeper(piece) == keeper) slices.emplace_back(piece, layout_.chunk().own_slice(piece));
  }
  return slices;
}

RackPhases::Zones RackPhases::own_zones(int32_t rack) const {
  Zones zones;
  for (const int32_t piece : layout_.kept_pieces()) {
    for (const RackZone& zone : layout_.own_zones(piece)) {
      if (zone.rack == rack) zones.emplace_back(piece, zone.places);
    }
  }
  return zones;
}

// Both ends walk the places of a pair of ranks in their order, so that their streams of bytes agree.
void RackPhases::send(PipelineStage stage, const Zones& zones, const NodeOfPiece& to,
                      const RegionOfPiece& source) const {
  for (const auto& [piece, places] : zones) {
    for (const PeerPlaces& peer : layout_.chunk().peers_at(piece, to(piece), places)) {
      for (const Extent& extent : cut(extents_, peer.places)) {
        add_send(stage, peer.rank, source(piece, extent.places.offset_bytes), extent.bytes());
      }
    }
  }
}

void RackPhases::receive(PipelineStage stage, const Zones& zones, const NodeOfPiece& from,
                         const RegionOfPiece& destination) const {
  for (const auto& [piece, places] : zones) {
    for (const PeerPlaces& peer : layout_.chunk().peers_at(piece, from(piece), places)) {
      for (const Extent& extent : cut(extents_, peer.places)) {
        add_receive(stage, peer.rank, destination(piece, extent.places.offset_bytes), extent.bytes());
      }
    }
  }
}

void RackPhases::send_partials(PipelineStage stage) const {
  const RegionOfPiece source = [this](int32_t piece, int64_t place) { return partial(piece, place); };
  for (const int32_t node : other_nodes_) {
    send(
        stage, own_slices(node), [&](int32_t) { return node; }, source);
  }
}

void RackPhases::sum_rack(PipelineStage stage) const {
  const std::vector<int32_t>& nodes = layout_.nodes();
  const Zones slices = own_slices(placement_.node());
  for (const int32_t node : std::views::reverse(other_nodes_)) {
    const size_t i = std::find(nodes.begin(), nodes.end(), node) - nodes.begin();
    receive(
        stage, slices, [&](int32_t) { return node; },
        [&](int32_t piece, int64_t place) { return incoming(i, piece, place); });
  }
  std::vector<Region> sources(nodes.size());
  for (const auto& [piece, places] : slices) {
    for (const Extent& extent : cut(extents_, places)) {
      const int64_t place = extent.places.offset_bytes;
      for (size_t i = 0; i < nodes.size(); ++i) {
        sources[i] = nodes[i] == placement_.node() ? partial(piece, place) : incoming(i, piece, place);
      }
      add_reduce(stage, sum(piece, place), sources, extent.bytes(), ReduceScope::kOfSomeNodes);
    }
  }
}

void RackPhases::send_sums(PipelineStage stage) const {
  const RegionOfPiece source = [this](int32_t piece, int64_t place) { return sum(piece, place); };
  for (const int32_t rack : other_racks_) send(stage, own_zones(rack), keeper_in(rack), source);
}

void RackPhases::complete(PipelineStage stage) const {
  const Zones zones = own_zones(layout_.rack());
  const auto racks = static_cast<size_t>(layout_.rack_count());
  for (const int32_t rack : std::views::reverse(other_racks_)) {
    receive(stage, zones, keeper_in(rack), [&](int32_t piece, int64_t place) { return incoming(rack, piece, place); });
  }
  std::vector<Region> sources(racks);
  for (const auto& [piece, places] : zones) {
    for (const Extent& extent : cut(extents_, places)) {
      const int64_t place = extent.places.offset_bytes;
      for (size_t rack = 0; rack < racks; ++rack) {
        const bool is_own = static_cast<int32_t>(rack) == layout_.rack();
        sources[rack] = is_own ? sum(piece, place) : incoming(rack, piece, place);
      }
      add_reduce(stage, result(piece, place), sources, extent.bytes(), ReduceScope::kOfNodes);
    }
  }
}

void RackPhases::send_completed(PipelineStage stage) const {
  const RegionOfPiece source = [this](int32_t piece, int64_t place) { return result(piece, place); };
  for (const int32_t rack : other_racks_) send(stage, own_zones(layout_.rack()), keeper_in(rack), source);
}

void RackPhases::receive_completed(PipelineStage stage) const {
  const RegionOfPiece destination = [this](int32_t piece, int64_t place) { return result(piece, place); };
  for (const int32_t rack : std::views::reverse(other_racks_)) {
    receive(stage, own_zones(rack), keeper_in(rack), destination);
  }
}

void RackPhases::send_results(PipelineStage stage) const {
  const RegionOfPiece source = [this](int32_t piece, int64_t place) { return result(piece, place); };
  for (const int32_t node : other_nodes_) {
    send(
        stage, own_slices(placement_.node()), [&](int32_t) { return node; }, source);
  }
}

void RackPhases::stage_kept_results(PipelineStage stage, const RegionOfPiece& slot) const {
  for (const auto& [piece, places] : own_slices(placement_.node())) {
    for (const Extent& extent : cut(extents_, places)) {
      const int64_t place = extent.places.offset_bytes;
      add_copy(stage, slot(piece, place), result(piece, place), extent.bytes());
    }
  }
}

void RackPhases::receive_results(PipelineStage stage, const RegionOfPiece& slot) const {
  for (const int32_t node : std::views::reverse(other_nodes_)) {
    receive(
        stage, own_slices(node), [&](int32_t) { return node; }, slot);
  }
}

}  // namespace zeropg

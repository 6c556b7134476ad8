// The phases between nodes of an all-reduce over racks (rack_layout.h), once the ranks of each node have met: what
// keepers add in their rack goes to the racks that complete it, and comes back the same way.
//
// Messages of a pair of ranks keep their order: all of one phase, in the order of places. A receive waits for a send of
// the iteration before; at most three phases' messages of a pair are under way (Note [Pipeline between nodes]).
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/rack_layout.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

class RackPhases {
 public:
  // All must outlive this object. `extents` are those of the chunks.
  RackPhases(const Placement& placement, const RackLayout& layout, const std::vector<Extent>& extents);

  int64_t scratch_bytes() const;
  // Scratch for this rank's slice of a piece, summed over its node.
  Region partial(int32_t piece, int64_t place) const;

  // Of pieces that other nodes of the rack keep, to them.
  void send_partials(PipelineStage stage) const;
  // What the nodes of the rack have of the kept pieces, added in their order, and sent to the racks that complete it.
  void sum_rack(PipelineStage stage) const;
  void send_sums(PipelineStage stage) const;
  // What all racks have of the own zones, added in their order, and sent to the other racks.
  void complete(PipelineStage stage) const;
  void send_completed(PipelineStage stage) const;
  // The zones that other racks completed; then kept pieces are complete, and go to the other nodes of the rack.
  void receive_completed(PipelineStage stage) const;
  void send_results(PipelineStage stage) const;
  // Kept pieces, and those of the other nodes, into the own slot.
  using RegionOfPiece = std::function<Region(int32_t piece, int64_t place)>;
  void stage_kept_results(PipelineStage stage, const RegionOfPiece& slot) const;
  void receive_results(PipelineStage stage, const RegionOfPiece& slot) const;

 private:
  using NodeOfPiece = std::function<int32_t(int32_t piece)>;
  using Zones = std::vector<std::pair<int32_t, Range>>;  // with their piece

  Region kept(int64_t slot, int32_t piece, int64_t place) const;  // in the n-th scratch for own slices of kept pieces
  Region sum(int32_t piece, int64_t place) const;
  Region result(int32_t piece, int64_t place) const;
  Region incoming(size_t source, int32_t piece, int64_t place) const;  // from a node of the rack, or from a rack
  Zones own_slices(int32_t keeper) const;                              // of the pieces that a node of the rack keeps
  Zones own_zones(int32_t rack) const;
  NodeOfPiece keeper_in(int32_t rack) const;
  void send(PipelineStage stage, const Zones& zones, const NodeOfPiece& to, const RegionOfPiece& source) const;
  void receive(PipelineStage stage, const Zones& zones, const NodeOfPiece& from,
               const RegionOfPiece& destination) const;

  const Placement& placement_;
  const RackLayout& layout_;
  const std::vector<Extent>& extents_;
  const int64_t slice_bytes_;  // room for any slice of this rank
  // Of the rack, and the other racks: those behind the own one first, who are sent to in this order and received from
  // in the other one, as Placement's other_nodes().
  std::vector<int32_t> other_nodes_;
  std::vector<int32_t> other_racks_;
};

}  // namespace zeropg

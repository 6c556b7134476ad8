// The phases between the domains of one node, that is its sockets or the groups of its CPUs that share a cache,
// whichever collective they serve: every byte crosses to each domain that needs it once, and not once for each rank of
// that domain.
//
// A domain is a node to Placement, ChunkLayout and node_phases.h. Part j of a chunk is completed in domain j, a piece
// by each of its ranks. One bank of a rank's slot holds
//   the chunk, at its places: what others of the domain reduce, and in the own slices what was completed of them,
//   the partial sums of the own slices, in the dtype that is accumulated in,
//   the piece that this rank has completed, for other domains to fetch.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// Whether a group has domains, is larger than what its flat algorithms serve well, and has banks that hold a chunk.
bool can_use_domains(const CollectiveSpec& spec);

// How many times as long as its elements partial sums are; 0 where there are none.
int64_t accumulator_widening(const CollectiveSpec& spec);

struct DomainPieces {
  int64_t alignment = 0;
  Chunks chunks{};  // their `bytes` are one rank's piece of a chunk
};
DomainPieces cut_over_domains(const CollectiveSpec& spec);         // of one tensor, world_size pieces of it in a chunk
DomainPieces cut_blocks_over_domains(const CollectiveSpec& spec);  // a piece of every rank's block in a chunk

class DomainPhases {
 public:
  // All must outlive this object. `extents` in the following are those of the chunks, at input or output alike.
  DomainPhases(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout);

  // Of this rank: its slice of a part, summed over its domain; its piece, summed over all.
  Region partial(int32_t part, int64_t place) const;
  Region completed(int64_t place) const;

  // Adds the partial sums of this rank's piece, in the order of domains.
  void complete(PipelineStage stage, const std::vector<Extent>& extents, const RegionOfPlace& destination) const;
  // Copies this rank's slices of all parts from the slots where they were completed to their places in the own one.
  void fetch(PipelineStage stage, const std::vector<Extent>& extents) const;

 private:
  Region partial_of(int32_t domain, int32_t local_rank, int32_t part, int64_t place) const;
  Region completed_of(int32_t domain, int32_t local_rank, int64_t place) const;
  int32_t owner_at(int32_t part, int32_t domain, int64_t place) const;  // whose slice a place is, by local rank

  const CollectiveSpec& spec_;
  const Placement& placement_;
  const ChunkLayout& layout_;
  const int64_t widening_;
  std::vector<std::vector<int64_t>> slices_before_;  // [domain][part]: bytes of a rank's slices of earlier parts
  int64_t partials_begin_ = 0;
  int64_t completed_begin_ = 0;
};

}  // namespace zeropg

// The phase between nodes: what the ranks of different nodes exchange for one chunk, whichever collective it serves.
//
// Each rank has its slice of every part (chunk_layout.h). In a reduction, the sums over a node's ranks go to the node
// that completes the part, which adds them in node order (send_partials, complete); what a node has completed goes to
// the nodes that want it (send_completed, receive_completed). The exchange is direct, every node with every other: two
// messages deep whatever the number of nodes, each byte 2 (m - 1) / m times on each node's link, and one rounding more
// than within a node for 16-bit floats, not one per hop.
//
// With a codec all of that travels encoded: partial sums by kContributionHop, and what was completed by kResultHop,
// once for all nodes; the node that completed it decodes its own encoding again, so that all ranks get the same bits.
// What a node adds of its own stays exact, unless the codec selects: then the sum is as sparse as what was sent.
//
// Note [Alone on a node]
// A rank that shares its node with nobody has no sums to make there, and nobody reads what it stages. Then its partial
// sums and what is completed lie where the results go; for a tensor that is reduced in place, its own values are its
// partial sums. Only the rank itself sees the difference: the messages are the same. But the tensor has been written to
// before the nodes have compared their calls: after an error its values are undefined.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/collectives/schedule/chunk_layout.h"
#include "backend/collectives/schedule/collective_spec.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/schedule.h"

namespace zeropg {

// Sizes. Several messages of a pair of ranks are under way at once: sent in one slot of a pipeline and received in a
// later one. All of them have to fit the window, else two ranks might wait for each other's room.

// Whether banks hold an element for each of `piece_count` pieces, and the window one for each message.
bool can_exchange(const CollectiveSpec& spec, int32_t piece_count, int32_t messages_under_way);
// A cache line where lines fit banks and window, else the element.
int64_t exchange_alignment(const CollectiveSpec& spec, int32_t piece_count, int32_t messages_under_way);
// The most bytes of a chunk that a staging slot holds: longer than within a node, as a message costs more than a
// barrier, but such that a large tensor has several chunks to overlap.
int64_t network_slot_bytes(const CollectiveSpec& spec);
int64_t network_chunk_bytes(const CollectiveSpec& spec, int64_t total_bytes, int64_t alignment);
// Whether no rank stages anything: Note [Alone on a node]. For costs, which are those of the slowest rank.
bool are_all_alone(const CollectiveSpec& spec);
// Whether nodes complete their CollectiveSpec::node_shares. Unequal parts have no places in common; so their chunk has
// to fit one slot, and in large groups its messages would be too short to be worth it.
bool can_use_shares(const CollectiveSpec& spec);
// Of a chunk with an equal part for each node, which may be longer: Note [Groups of parts] in slot_layout.h.
int64_t parted_chunk_bytes(const CollectiveSpec& spec, int64_t total_bytes, int64_t alignment);
int64_t largest_message_bytes(const CollectiveSpec& spec, int32_t messages_under_way, int64_t alignment);

// The cut of collectives whose chunks are not divided among the nodes.
struct WholeChunks {
  int64_t alignment = 0;
  Chunks chunks{};
};
WholeChunks cut_whole(const CollectiveSpec& spec, int32_t messages_under_way);

// The cut of collectives whose chunks hold a piece of every rank's block.
struct BlockPieces {
  int64_t alignment = 0;
  Chunks chunks{};  // of one block
};
BlockPieces cut_blocks(const CollectiveSpec& spec, int32_t messages_under_way);
int32_t group_count(const CollectiveSpec& spec, const BlockPieces& pieces);  // in a chunk: slot_layout.h

class InternodePhases {
 public:
  // All must outlive this object. `extents` in the following are those of the chunks, at input or output alike.
  // `results`: where partial sums lie, if not in scratch: Note [Alone on a node].
  InternodePhases(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout,
                  std::vector<Extent> results = {});

  int64_t scratch_bytes() const;

  // For this rank's slice of a part, summed over its node; two chunks may be under way.
  Region partial(int32_t part, int64_t place) const;
  // For this rank's slice of its node's part, summed over all nodes; two chunks may be under way.
  Region completed(int64_t place) const;

  // Sends the partial sums of the parts of `nodes`, not the own one, to them.
  void send_partials(PipelineStage stage, const std::vector<int32_t>& nodes, const std::vector<Extent>& extents) const;
  // Receives the other nodes' partial sums of this node's part and adds all in node order.
  void complete(PipelineStage stage, const std::vector<Extent>& extents, const RegionOfPlace& destination) const;
  // Sends this rank's slice of its node's part to `nodes`; with a codec `source` becomes what they will decode.
  void send_completed(PipelineStage stage, const std::vector<int32_t>& nodes, const std::vector<Extent>& extents,
                      const RegionOfPlace& source) const;
  // Receives this rank's slice of the part of another node.
  void receive_completed(PipelineStage stage, int32_t node, const std::vector<Extent>& extents,
                         const RegionOfPlace& destination) const;
  // Any part's, as it is: this rank's slice of it goes to those who have these places at `node`, or comes from them.
  void send_slice(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                  const RegionOfPlace& source) const;
  void receive_slice(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                     const RegionOfPlace& destination) const;

 private:
  Region incoming(int32_t node, int64_t place) const;
  bool is_encoded() const { return spec_.codec != nullptr; }
  int64_t encoding_bytes() const;  // room for an encoding of a slice
  Region outgoing_encoding() const;
  Region incoming_encoding() const;
  Region residual_of(ResidualHop hop, const Extent& extent) const;
  void send_encoded(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                    const RegionOfPlace& source) const;
  void send_completed_encoded(PipelineStage stage, const std::vector<int32_t>& nodes,
                              const std::vector<Extent>& extents, const RegionOfPlace& source) const;
  void receive_completed_encoded(PipelineStage stage, int32_t node, const std::vector<Extent>& extents,
                                 const RegionOfPlace& destination) const;
  void receive_encoding(PipelineStage stage, ResidualHop hop, int32_t rank, Region destination, StepBytes bytes) const;
  std::vector<Range> pieces_of(int32_t node, int32_t local_rank) const;
  int32_t own_part() const { return layout_.part_of_node(placement_.node()); }

  const CollectiveSpec& spec_;
  const Placement& placement_;
  const ChunkLayout& layout_;
  const std::vector<Extent> results_;
  const int64_t slice_bytes_;     // room for any slice of this rank
  const int32_t partial_slices_;  // of two chunks, in scratch
};

}  // namespace zeropg

#include "backend/collectives/phases/internode_phases.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "backend/collectives/schedule/encodings.h"
#include "backend/collectives/schedule/slot_layout.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

// 64 KiB take 0.5 ms at 1 Gb/s, ten times a hop's latency. (Open MPI's HAN pipelines segments of 512 KiB between nodes;
// with 256 KiB more stays in the caches: 2 x 2 ranks, 1 MiB over links without a limit: 0.95 and 0.65 ms.)
constexpr int64_t kMostChunkBytes = 256 << 10;
constexpr int64_t kLeastChunkBytes = 64 << 10;
constexpr int64_t kMostSlotBytes = 512 << 10;  // of a bank
constexpr int64_t kChunksToOverlap = 4;
// A message costs its two ends some 27 us of CPU together, beside its bytes. 16 KiB take 13 us at 10 Gb/s, which eight
// ranks of a node share; so its cost is a fraction of the link's time there, and at 4 KiB as much.
constexpr int64_t kLeastMessageBytes = 4 << 10;
constexpr int64_t kMostMessageBytes = 16 << 10;

int64_t whole_lines(int64_t bytes) { return part_count(bytes, kCacheLineBytes) * kCacheLineBytes; }

Region scratch(int64_t offset_bytes) { return {.space = Space::kScratch, .offset_bytes = offset_bytes}; }

}  // namespace

bool can_exchange(const CollectiveSpec& spec, int32_t piece_count, int32_t messages_under_way) {
  if (spec.codec != nullptr) {
    const int64_t alignment = exchange_alignment(spec, piece_count, messages_under_way);
    return network_slot_bytes(spec) >= piece_count * alignment &&
           largest_message_bytes(spec, messages_under_way, alignment) >= alignment;
  }
  return can_cut_chunk(spec, piece_count) && spec.window_bytes >= int64_t{messages_under_way} * spec.element_bytes;
}

int64_t exchange_alignment(const CollectiveSpec& spec, int32_t piece_count, int32_t messages_under_way) {
  // Whole blocks of a codec, in memory and on the way: a slice may be sent in parts.
  if (spec.codec != nullptr) return std::lcm(kCacheLineBytes, kFloatBytes * spec.codec->block_elements());
  const bool has_lines =
      spec.bank_bytes >= piece_count * kCacheLineBytes && spec.window_bytes >= messages_under_way * kCacheLineBytes;
  return has_lines ? kCacheLineBytes : spec.element_bytes;
}

int64_t network_slot_bytes(const CollectiveSpec& spec) { return std::min(spec.bank_bytes, kMostSlotBytes); }

int64_t network_chunk_bytes(const CollectiveSpec& spec, int64_t total_bytes, int64_t alignment) {
  const int64_t wanted = std::max(total_bytes / kChunksToOverlap, kLeastChunkBytes);
  const int64_t most = std::min(network_slot_bytes(spec), kMostChunkBytes);
  return std::max(std::min(most, wanted) / alignment, int64_t{1}) * alignment;
}

bool are_all_alone(const CollectiveSpec& spec) { return largest_node_size(spec) == 1 && spec.codec == nullptr; }

bool can_use_shares(const CollectiveSpec& spec) {
  const int64_t messages = int64_t{node_count(spec)} * largest_node_size(spec);
  return !spec.node_shares.empty() && messages * kLeastMessageBytes <= network_slot_bytes(spec);
}

int64_t parted_chunk_bytes(const CollectiveSpec& spec, int64_t total_bytes, int64_t alignment) {
  const int64_t messages = int64_t{node_count(spec)} * largest_node_size(spec);
  const int64_t wanted =
      std::clamp(total_bytes / kChunksToOverlap, messages * kLeastMessageBytes, messages * kMostMessageBytes);
  // Each part fits a slot. All parts are equal, so that they have the same places in it.
  const int64_t parts = int64_t{node_count(spec)} * alignment;
  const int64_t most = network_slot_bytes(spec) / alignment * parts;
  const int64_t one_slot = network_chunk_bytes(spec, total_bytes, alignment);
  return std::max(one_slot, std::min(wanted, most) / parts * parts);
}

int64_t largest_message_bytes(const CollectiveSpec& spec, int32_t messages_under_way, int64_t alignment) {
  const int64_t room = spec.window_bytes / messages_under_way;
  if (spec.codec == nullptr) return room / alignment * alignment;
  // An encoding may be longer than what it encodes.
  const int64_t room_of_least = std::max(alignment, room_of_encoding(spec, kResultHop, alignment));
  return room / room_of_least * alignment;
}

WholeChunks cut_whole(const CollectiveSpec& spec, int32_t messages_under_way) {
  const int64_t alignment = exchange_alignment(spec, 1, messages_under_way);
  // A message is at most a slice of the larger node of a pair.
  const int64_t most =
      std::min(network_chunk_bytes(spec, spec.bytes, alignment),
               second_smallest_node_size(spec) * largest_message_bytes(spec, messages_under_way, alignment));
  return {alignment, equal_chunks(spec.bytes, most, alignment)};
}

BlockPieces cut_blocks(const CollectiveSpec& spec, int32_t messages_under_way) {
  const int64_t alignment = exchange_alignment(spec, spec.world_size, messages_under_way);
  const int64_t total_bytes = spec.world_size * spec.bytes;
  const int64_t in_slot = network_chunk_bytes(spec, total_bytes, alignment) / spec.world_size;
  const int64_t wanted = std::clamp(spec.bytes / kChunksToOverlap, kLeastMessageBytes, kMostMessageBytes);
  // The part of the largest node fits a slot.
  const int64_t most = std::min(wanted, network_slot_bytes(spec) / largest_node_size(spec));
  const int64_t bytes = std::max(std::max(in_slot, most) / alignment, int64_t{1}) * alignment;
  return {
      alignment,
      equal_chunks(spec.bytes, std::min(bytes, largest_message_bytes(spec, messages_under_way, alignment)), alignment)};
}

int32_t group_count(const CollectiveSpec& spec, const BlockPieces& pieces) {
  if (spec.world_size * pieces.chunks.bytes <= network_slot_bytes(spec)) return 1;
  return group_count(node_count(spec), largest_node_size(spec) * pieces.chunks.bytes, network_slot_bytes(spec));
}

InternodePhases::InternodePhases(const CollectiveSpec& spec, const Placement& placement, const ChunkLayout& layout,
                                 std::vector<Extent> results)
    : spec_(spec),
      placement_(placement),
      layout_(layout),
      results_(std::move(results)),
      slice_bytes_(whole_lines(layout.largest_own_slice_bytes())),
      partial_slices_(results_.empty() ? 2 * layout.part_count() : 0) {}

// Scratch, in slices: partial sums of two chunks, what comes in from each node, completed slices of two chunks. Behind
// them, with a codec, an encoding on its way out and one on its way in.
int64_t InternodePhases::scratch_bytes() const {
  const int64_t slices = (partial_slices_ + placement_.node_count() + 2) * slice_bytes_;
  return is_encoded() ? slices + 2 * encoding_bytes() : slices;
}

int64_t InternodePhases::encoding_bytes() const {
  return whole_lines(std::max(room_of_encoding(spec_, kContributionHop, slice_bytes_),
                              room_of_encoding(spec_, kResultHop, slice_bytes_)));
}

Region InternodePhases::outgoing_encoding() const {
  return scratch((partial_slices_ + placement_.node_count() + 2) * slice_bytes_);
}

Region InternodePhases::incoming_encoding() const { return advance(outgoing_encoding(), encoding_bytes()); }

// Residuals are counted over the whole input: blocks of a list as if they were packed.
Region InternodePhases::residual_of(ResidualHop hop, const Extent& extent) const {
  const int64_t first = extent.tensor.index * spec_.bytes + extent.tensor.offset_bytes;
  return with_stride(residual(spec_, hop, first), extent.tensor.stride_bytes);
}

Region InternodePhases::partial(int32_t part, int64_t place) const {
  if (!results_.empty()) return tensor_at(results_, place);
  const Region first = scratch(part * slice_bytes_ + place - layout_.own_slice(part).offset_bytes);
  return with_stride(first, layout_.part_count() * slice_bytes_);
}

Region InternodePhases::incoming(int32_t node, int64_t place) const {
  const int64_t slice = partial_slices_ + node;
  return scratch(slice * slice_bytes_ + place - layout_.own_slice(own_part()).offset_bytes);
}

Region InternodePhases::completed(int64_t place) const {
  if (!results_.empty()) return tensor_at(results_, place);
  const int64_t slice = partial_slices_ + placement_.node_count();
  return with_stride(scratch(slice * slice_bytes_ + place - layout_.own_slice(own_part()).offset_bytes), slice_bytes_);
}

// Both ends walk the overlaps of a pair of ranks in the order of places, so their streams of bytes agree.
void InternodePhases::send_slice(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                                 const RegionOfPlace& source) const {
  for (const PeerPlaces& peer : layout_.peers_at(part, node, layout_.own_slice(part))) {
    for (const Extent& extent : cut(extents, peer.places)) {
      const int64_t place = extent.places.offset_bytes;
      add_send(stage, peer.rank, source(place), extent.bytes());
    }
  }
}

// Each message is an encoding of its own.
void InternodePhases::send_encoded(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                                   const RegionOfPlace& source) const {
  for (const PeerPlaces& peer : layout_.peers_at(part, node, layout_.own_slice(part))) {
    for (const Extent& extent : cut(extents, peer.places)) {
      const int64_t place = extent.places.offset_bytes;
      add_encode(stage, kContributionHop, outgoing_encoding(), source(place), residual_of(kContributionHop, extent),
                 extent.bytes());
      add_send_encoding(stage, spec_, kContributionHop, peer.rank, outgoing_encoding(), extent.bytes());
    }
  }
}

// The slice of a rank of `node` of its node's part, cut where slices of ranks of other nodes begin: each piece goes to
// one rank of each of those nodes.
std::vector<Range> InternodePhases::pieces_of(int32_t node, int32_t local_rank) const {
  const int32_t part = layout_.part_of_node(node);
  const Range slice = layout_.slice(part, node, local_rank);
  std::set<int64_t> cuts{slice.offset_bytes, slice.offset_bytes + slice.bytes};
  for (int32_t other = 0; other < placement_.node_count(); ++other) {
    for (int32_t peer = 0; other != node && peer < placement_.node_size(other); ++peer) {
      const Range common = overlap(slice, layout_.slice(part, other, peer));
      if (common.bytes > 0) cuts.insert({common.offset_bytes, common.offset_bytes + common.bytes});
    }
  }
  std::vector<Range> pieces;
  for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) pieces.push_back({*cut, *std::next(cut) - *cut});
  return pieces;
}

// One encoding of each piece for all nodes, so that all get the same bits.
void InternodePhases::send_completed_encoded(PipelineStage stage, const std::vector<int32_t>& nodes,
                                             const std::vector<Extent>& extents, const RegionOfPlace& source) const {
  for (const Range& piece : pieces_of(placement_.node(), placement_.local_rank())) {
    for (const Extent& extent : cut(extents, piece)) {
      const int64_t place = extent.places.offset_bytes;
      add_encode(stage, kResultHop, outgoing_encoding(), source(place), residual_of(kResultHop, extent),
                 extent.bytes());
      for (const int32_t node : nodes) {
        for (int32_t peer = 0; node != placement_.node() && peer < placement_.node_size(node); ++peer) {
          if (overlap(piece, layout_.slice(own_part(), node, peer)).bytes == 0) continue;
          add_send_encoding(stage, spec_, kResultHop, placement_.rank_at(node, peer), outgoing_encoding(),
                            extent.bytes());
        }
      }
      add_decode(stage, kResultHop, source(place), outgoing_encoding(), extent.bytes());
    }
  }
}

void InternodePhases::receive_slice(PipelineStage stage, int32_t part, int32_t node, const std::vector<Extent>& extents,
                                    const RegionOfPlace& destination) const {
  for (const PeerPlaces& peer : layout_.peers_at(part, node, layout_.own_slice(part))) {
    for (const Extent& extent : cut(extents, peer.places)) {
      const int64_t place = extent.places.offset_bytes;
      if (is_encoded()) {
        receive_encoding(stage, kContributionHop, peer.rank, destination(place), extent.bytes());
      } else {
        add_receive(stage, peer.rank, destination(place), extent.bytes());
      }
    }
  }
}

void InternodePhases::receive_completed_encoded(PipelineStage stage, int32_t node, const std::vector<Extent>& extents,
                                                const RegionOfPlace& destination) const {
  const Range own = layout_.own_slice(layout_.part_of_node(node));
  for (int32_t peer = 0; peer < placement_.node_size(node); ++peer) {
    for (const Range& piece : pieces_of(node, peer)) {
      for (const Extent& extent : cut(extents, overlap(own, piece))) {
        const int64_t place = extent.places.offset_bytes;
        receive_encoding(stage, kResultHop, placement_.rank_at(node, peer), destination(place), extent.bytes());
      }
    }
  }
}

void InternodePhases::receive_encoding(PipelineStage stage, ResidualHop hop, int32_t rank, Region destination,
                                       StepBytes bytes) const {
  add_receive_encoding(stage, spec_, hop, rank, incoming_encoding(), bytes);
  add_decode(stage, hop, destination, incoming_encoding(), bytes);
}

void InternodePhases::send_partials(PipelineStage stage, const std::vector<int32_t>& nodes,
                                    const std::vector<Extent>& extents) const {
  for (const int32_t node : nodes) {
    const int32_t part = layout_.part_of_node(node);
    const RegionOfPlace source = [&](int64_t place) { return partial(part, place); };
    if (is_encoded()) {
      send_encoded(stage, part, node, extents, source);
    } else {
      send_slice(stage, part, node, extents, source);
    }
  }
}

void InternodePhases::complete(PipelineStage stage, const std::vector<Extent>& extents,
                               const RegionOfPlace& destination) const {
  const int32_t part = own_part();
  for (auto node = placement_.other_nodes().rbegin(); node != placement_.other_nodes().rend(); ++node) {
    receive_slice(stage, part, *node, extents, [&](int64_t place) { return incoming(*node, place); });
  }
  std::vector<Region> sources(placement_.node_count());
  for (const Extent& extent : cut(extents, layout_.own_slice(part))) {
    const int64_t place = extent.places.offset_bytes;
    if (is_encoded() && spec_.codec->selects()) {
      add_round_trip(stage, kContributionHop, partial(part, place), partial(part, place), outgoing_encoding(),
                     residual_of(kContributionHop, extent), extent.bytes());
    }
    for (int32_t node = 0; node < placement_.node_count(); ++node) {
      sources[node] = node == placement_.node() ? partial(part, place) : incoming(node, place);
    }
    add_reduce(stage, destination(place), sources, extent.bytes(), ReduceScope::kOfNodes);
  }
}

void InternodePhases::send_completed(PipelineStage stage, const std::vector<int32_t>& nodes,
                                     const std::vector<Extent>& extents, const RegionOfPlace& source) const {
  if (is_encoded()) return send_completed_encoded(stage, nodes, extents, source);
  for (const int32_t node : nodes) {
    if (node != placement_.node()) send_slice(stage, own_part(), node, extents, source);
  }
}

void InternodePhases::receive_completed(PipelineStage stage, int32_t node, const std::vector<Extent>& extents,
                                        const RegionOfPlace& destination) const {
  if (is_encoded()) return receive_completed_encoded(stage, node, extents, destination);
  receive_slice(stage, layout_.part_of_node(node), node, extents, destination);
}

}  // namespace zeropg

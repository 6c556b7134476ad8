// Collectives whose bytes travel encoded, every rank with every other one.
//
// A range of the data has one owner. In the first phase each rank encodes what it contributes to each peer's range and
// sends it; the owner decodes and adds all in rank order, its own contribution as it is (or, where the codec selects
// values, as sparse as all others). A reduce-scatter is done then. For an all-reduce the owner encodes its result and
// sends it to all, and decodes it again itself: all ranks get the same bits. An all-gather is that second phase. What
// an encoding loses stays in a residual of its phase, if there are any. (As in Tang et al., "1-bit Adam", section 4,
// and DeepSpeed's ZeRO++, section 3.3; of a selection, as in Renggli et al., "SparCML", section 5.3, split and
// gathered.)
//
// Piece by piece of all ranges: a rank sends to all peers what they own of piece k, then receives what it owns. Until a
// rank gets to the sends of piece k + 1 its peers have received all that it had sent of piece k's first phase, so with
// half a mailbox per piece no send waits for a rank that waits for it.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/encodings.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"

namespace zeropg {

namespace {

constexpr int64_t kLargestPieceBytes = 512 << 10;  // of floats: with its encodings it stays in the L2 cache

int64_t round_up(int64_t bytes, int64_t alignment) { return part_count(bytes, alignment) * alignment; }

int64_t largest_room(const CollectiveSpec& spec, int64_t bytes) {
  return std::max(room_of_encoding(spec, kContributionHop, bytes), room_of_encoding(spec, kResultHop, bytes));
}

// Bytes of floats that are encoded, sent and decoded at a time; 0 where the mailboxes are too small for a block.
int64_t largest_piece_bytes(const CollectiveSpec& spec) {
  const int64_t block_bytes = spec.codec->block_elements() * kFloatBytes;
  int64_t blocks = std::max<int64_t>(1, kLargestPieceBytes / block_bytes);
  while (blocks > 0 && largest_room(spec, blocks * block_bytes) > spec.mailbox_bytes / 2) blocks /= 2;
  return blocks * block_bytes;
}

class Exchange {
 public:
  // `owned[rank]`: that rank's range of the data.
  Exchange(const CollectiveSpec& spec, std::string_view name, std::vector<Range> owned)
      : spec_(spec), owned_(std::move(owned)), schedule_(make_schedule(name, 0)) {
    int64_t largest = 0;
    for (const Range& range : owned_) largest = std::max(largest, range.bytes);
    piece_bytes_ = std::min(largest_piece_bytes(spec), largest);
    encoding_bytes_ = round_up(largest_room(spec, piece_bytes_), kCacheLineBytes);
    schedule_.scratch_bytes = 2 * encoding_bytes_ + 2 * round_up(piece_bytes_, kCacheLineBytes);
  }

  Schedule reduce_scatter() && {
    if (piece_bytes_ == 0) return std::move(schedule_);
    select();
    contribute();
    collect(in_pieces(output(0)));
    return std::move(schedule_);
  }

  Schedule all_reduce() && {
    if (piece_bytes_ == 0) return std::move(schedule_);
    select();
    contribute();
    collect(sum());
    send_result(sum());
    receive_results();
    return std::move(schedule_);
  }

  Schedule all_gather() && {
    if (piece_bytes_ == 0) return std::move(schedule_);
    send_result(in_pieces(input(0)));
    receive_results();
    return std::move(schedule_);
  }

 private:
  Region scratch(int64_t offset_bytes) const { return {.space = Space::kScratch, .offset_bytes = offset_bytes}; }
  Region outgoing() const { return scratch(0); }
  Region incoming() const { return scratch(encoding_bytes_); }
  Region sum() const { return scratch(2 * encoding_bytes_); }
  Region selected() const { return advance(sum(), round_up(piece_bytes_, kCacheLineBytes)); }

  Region in_pieces(Region first) const { return with_stride(first, piece_bytes_); }
  Chunks pieces_of(int32_t owner) const { return chunks_of_size(owned_[owner].bytes, piece_bytes_); }
  PipelineStage stage_of(int32_t owner) { return {schedule_, 0, pieces_of(owner).count}; }
  Region residual_of(ResidualHop hop, int32_t owner) const {
    return in_pieces(residual(spec_, hop, owned_[owner].offset_bytes));
  }
  Region contribution(int32_t owner) const {
    if (spec_.op == OpKind::kAllReduce) return in_pieces(input(owned_[owner].offset_bytes));
    return in_pieces(input_block(spec_, owner, 0));
  }
  // Where the caller wants what `owner` sends.
  Region place_of(int32_t owner) const {
    if (spec_.op == OpKind::kAllReduce) return in_pieces(output(owned_[owner].offset_bytes));
    return in_pieces(output_block(spec_, owner, 0));
  }

  // Peers in turn, the next rank first: at any time every rank sends to another one.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int32_t distance = 1; distance < spec_.world_size; ++distance) {
      visit((spec_.rank + distance) % spec_.world_size);
    }
  }

  void select() {
    if (!spec_.codec->selects()) return;
    const Range& last = owned_.back();
    add_select(schedule_, input(0), residual(spec_, kContributionHop, 0), last.offset_bytes + last.bytes);
  }

  void contribute() {
    for_each_peer([&](int32_t owner) {
      add_encode(stage_of(owner), kContributionHop, outgoing(), contribution(owner),
                 residual_of(kContributionHop, owner), pieces_of(owner));
      add_send_encoding(stage_of(owner), spec_, kContributionHop, owner, outgoing(), pieces_of(owner));
    });
  }

  Region own_contribution() {
    const Region exact = contribution(spec_.rank);
    if (!spec_.codec->selects()) return exact;
    add_round_trip(stage_of(spec_.rank), kContributionHop, selected(), exact, outgoing(),
                   residual_of(kContributionHop, spec_.rank), pieces_of(spec_.rank));
    return selected();
  }

  // The result may be written over the input, so the sum grows in scratch.
  void collect(Region destination) {
    const PipelineStage stage = stage_of(spec_.rank);
    const Chunks pieces = pieces_of(spec_.rank);
    const Region mine = own_contribution();
    for (int32_t rank = 0; rank < spec_.world_size; ++rank) {
      if (rank == spec_.rank && rank == 0) {
        add_copy(stage, sum(), mine, pieces);
      } else if (rank == spec_.rank) {
        const std::vector<Region> sources{sum(), mine};
        add_reduce(stage, sum(), sources, pieces, ReduceScope::kOfRanks);
      } else {
        add_receive_encoding(stage, spec_, kContributionHop, rank, incoming(), pieces);
        if (rank == 0) {
          add_decode(stage, kContributionHop, sum(), incoming(), pieces);
        } else {
          add_decode_add(stage, kContributionHop, sum(), incoming(), pieces);
        }
      }
    }
    const Region total = sum();
    add_reduce(stage, destination, {&total, 1}, pieces);
  }

  void send_result(Region result) {
    const PipelineStage stage = stage_of(spec_.rank);
    const Chunks pieces = pieces_of(spec_.rank);
    add_encode(stage, kResultHop, outgoing(), result, residual_of(kResultHop, spec_.rank), pieces);
    for_each_peer([&](int32_t peer) { add_send_encoding(stage, spec_, kResultHop, peer, outgoing(), pieces); });
    add_decode(stage, kResultHop, place_of(spec_.rank), outgoing(), pieces);
  }

  void receive_results() {
    for_each_peer([&](int32_t owner) {
      add_receive_encoding(stage_of(owner), spec_, kResultHop, owner, incoming(), pieces_of(owner));
      add_decode(stage_of(owner), kResultHop, place_of(owner), incoming(), pieces_of(owner));
    });
  }

  const CollectiveSpec& spec_;
  const std::vector<Range> owned_;
  int64_t piece_bytes_ = 0;
  int64_t encoding_bytes_ = 0;  // room for the encoding of a piece
  Schedule schedule_;
};

std::vector<Range> blocks_of(const CollectiveSpec& spec) {
  std::vector<Range> owned;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) owned.push_back({rank * spec.bytes, spec.bytes});
  return owned;
}

}  // namespace

bool supports_compressed_exchange(const CollectiveSpec& spec) {
  return spec.codec != nullptr && is_one_node(spec) && (spec.world_size == 1 || largest_piece_bytes(spec) > 0) &&
         !(spec.codec->selects() && spec.input_is_list);
}

Schedule plan_all_reduce_compressed(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_reduce_compressed";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  // Whole blocks, so that only the last range has a shorter one.
  const int64_t alignment = spec.codec->block_elements() * kFloatBytes;
  std::vector<Range> owned;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) {
    owned.push_back(equal_part_of(spec.bytes, spec.world_size, alignment, rank));
  }
  return Exchange(spec, kName, std::move(owned)).all_reduce();
}

Schedule plan_reduce_scatter_compressed(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "reduce_scatter_compressed";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  return Exchange(spec, kName, blocks_of(spec)).reduce_scatter();
}

Schedule plan_all_gather_compressed(const CollectiveSpec& spec) {
  constexpr std::string_view kName = "all_gather_compressed";
  if (spec.world_size == 1) return plan_alone(kName, spec);
  return Exchange(spec, kName, blocks_of(spec)).all_gather();
}

// Encode what others own, decode what they send, reduce.
Cost cost_all_reduce_compressed(const CollectiveSpec& spec) {
  return {.barriers = 1, .memory_bytes = 6.0 * spec.bytes};
}

Cost cost_reduce_scatter_compressed(const CollectiveSpec& spec) {
  return {.barriers = 1, .memory_bytes = 4.0 * spec.world_size * spec.bytes};
}

Cost cost_all_gather_compressed(const CollectiveSpec& spec) {
  return {.barriers = 1, .memory_bytes = 2.0 * spec.world_size * spec.bytes};
}

}  // namespace zeropg

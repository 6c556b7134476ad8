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
    piece_count_ = largest == 0 ? 0 : part_count(largest, piece_bytes_);
    encoding_bytes_ = round_up(largest_room(spec, piece_bytes_), kCacheLineBytes);
    schedule_.scratch_bytes = 2 * encoding_bytes_ + 2 * round_up(piece_bytes_, kCacheLineBytes);
  }

  Schedule reduce_scatter() && {
    select();
    for (int64_t piece = 0; piece < piece_count_; ++piece) {
      contribute(piece);
      collect(piece, output(part(spec_.rank, piece).offset_bytes - owned_[spec_.rank].offset_bytes));
    }
    return std::move(schedule_);
  }

  Schedule all_reduce() && {
    select();
    for (int64_t piece = 0; piece < piece_count_; ++piece) {
      contribute(piece);
      collect(piece, sum());
      send_result(piece, sum());
      receive_results(piece);
    }
    return std::move(schedule_);
  }

  Schedule all_gather() && {
    for (int64_t piece = 0; piece < piece_count_; ++piece) {
      send_result(piece, input(part(spec_.rank, piece).offset_bytes - owned_[spec_.rank].offset_bytes));
      receive_results(piece);
    }
    return std::move(schedule_);
  }

 private:
  Region scratch(int64_t offset_bytes) const { return {.space = Space::kScratch, .offset_bytes = offset_bytes}; }
  Region outgoing() const { return scratch(0); }
  Region incoming() const { return scratch(encoding_bytes_); }
  Region sum() const { return scratch(2 * encoding_bytes_); }
  Region selected() const { return advance(sum(), round_up(piece_bytes_, kCacheLineBytes)); }

  Range part(int32_t owner, int64_t piece) const {
    const auto [offset, bytes] = part_of(owned_[owner].bytes, piece_bytes_, piece);
    return {owned_[owner].offset_bytes + offset, bytes};
  }
  Region contribution(int32_t owner, int64_t piece) const {
    if (spec_.op == OpKind::kAllReduce) return input(part(owner, piece).offset_bytes);
    return input_block(spec_, owner, part(owner, piece).offset_bytes - owned_[owner].offset_bytes);
  }
  // Where the caller wants what `owner` sends.
  Region place_of(int32_t owner, int64_t piece) const {
    if (spec_.op == OpKind::kAllReduce) return output(part(owner, piece).offset_bytes);
    return output_block(spec_, owner, part(owner, piece).offset_bytes - owned_[owner].offset_bytes);
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

  void contribute(int64_t piece) {
    for_each_peer([&](int32_t owner) {
      const auto [offset, bytes] = part(owner, piece);
      add_encode(schedule_, kContributionHop, outgoing(), contribution(owner, piece),
                 residual(spec_, kContributionHop, offset), bytes);
      add_send_encoding(schedule_, spec_, kContributionHop, owner, outgoing(), bytes);
    });
  }

  Region own_contribution(int64_t piece) {
    const Region exact = contribution(spec_.rank, piece);
    if (!spec_.codec->selects()) return exact;
    const auto [offset, bytes] = part(spec_.rank, piece);
    add_round_trip(schedule_, kContributionHop, selected(), exact, outgoing(),
                   residual(spec_, kContributionHop, offset), bytes);
    return selected();
  }

  // The result may be written over the input, so the sum grows in scratch.
  void collect(int64_t piece, Region destination) {
    const int64_t bytes = part(spec_.rank, piece).bytes;
    const Region mine = own_contribution(piece);
    for (int32_t rank = 0; rank < spec_.world_size; ++rank) {
      if (rank == spec_.rank && rank == 0) {
        add_copy(schedule_, sum(), mine, bytes);
      } else if (rank == spec_.rank) {
        const std::vector<Region> sources{sum(), mine};
        add_reduce(schedule_, sum(), sources, bytes, ReduceScope::kOfRanks);
      } else {
        add_receive_encoding(schedule_, spec_, kContributionHop, rank, incoming(), bytes);
        if (rank == 0) {
          add_decode(schedule_, kContributionHop, sum(), incoming(), bytes);
        } else {
          add_decode_add(schedule_, kContributionHop, sum(), incoming(), bytes);
        }
      }
    }
    const Region total = sum();
    add_reduce(schedule_, destination, {&total, 1}, bytes);
  }

  void send_result(int64_t piece, Region result) {
    const auto [offset, bytes] = part(spec_.rank, piece);
    add_encode(schedule_, kResultHop, outgoing(), result, residual(spec_, kResultHop, offset), bytes);
    for_each_peer([&](int32_t peer) { add_send_encoding(schedule_, spec_, kResultHop, peer, outgoing(), bytes); });
    add_decode(schedule_, kResultHop, place_of(spec_.rank, piece), outgoing(), bytes);
  }

  void receive_results(int64_t piece) {
    for_each_peer([&](int32_t owner) {
      const int64_t bytes = part(owner, piece).bytes;
      add_receive_encoding(schedule_, spec_, kResultHop, owner, incoming(), bytes);
      add_decode(schedule_, kResultHop, place_of(owner, piece), incoming(), bytes);
    });
  }

  const CollectiveSpec& spec_;
  const std::vector<Range> owned_;
  int64_t piece_bytes_ = 0;
  int64_t piece_count_ = 0;
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

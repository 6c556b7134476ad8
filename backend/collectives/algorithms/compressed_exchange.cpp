// Reductions whose bytes travel encoded, every rank with every other one.
//
// A range of the data has one owner. In the first phase each rank encodes what it contributes to each peer's range and
// sends it; the owner decodes and adds all in rank order, its own contribution as it is. A reduce-scatter is done then.
// For an all-reduce the owner encodes its result and sends it to all, and decodes it again itself: all ranks get the
// same bits. What an encoding loses stays in a residual of its phase, if there are any. (As in Tang et al., "1-bit
// Adam", section 4, and DeepSpeed's ZeRO++, section 3.3.)
//
// Piece by piece of all ranges: a rank sends to all peers what they own of piece k, then receives what it owns. Until a
// rank gets to the sends of piece k + 1 its peers have received all that it had sent of piece k's first phase, so with
// half a mailbox per piece no send waits for a rank that waits for it.
#include <algorithm>
#include <string_view>
#include <vector>

#include "backend/collectives/schedule/algorithms.h"
#include "backend/collectives/schedule/placement.h"
#include "backend/collectives/schedule/steps.h"
#include "compression/error_feedback.h"

namespace zeropg {

namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kLargestPieceBytes = 512 << 10;  // of floats: with its encodings it stays in the L2 cache

int64_t round_up(int64_t bytes, int64_t alignment) { return part_count(bytes, alignment) * alignment; }

// Bytes of floats that are encoded, sent and decoded at a time; 0 where the mailboxes are too small for a block.
int64_t largest_piece_bytes(const CollectiveSpec& spec) {
  const int64_t block = spec.codec->block_elements();
  const int64_t blocks_in_mailbox = spec.mailbox_bytes / 2 / spec.codec->encoded_bytes(block);
  const int64_t blocks_in_cache = std::max<int64_t>(1, kLargestPieceBytes / (kFloatBytes * block));
  return std::min(blocks_in_mailbox, blocks_in_cache) * block * kFloatBytes;
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
    encoded_bytes_ = round_up(encoded(piece_bytes_), kCacheLineBytes);
    schedule_.scratch_bytes = 2 * encoded_bytes_ + piece_bytes_;
  }

  Schedule reduce_scatter() && {
    for (int64_t piece = 0; piece < piece_count_; ++piece) {
      contribute(piece);
      collect(piece, output(part(spec_.rank, piece).offset_bytes - owned_[spec_.rank].offset_bytes));
    }
    return std::move(schedule_);
  }

  Schedule all_reduce() && {
    for (int64_t piece = 0; piece < piece_count_; ++piece) {
      contribute(piece);
      collect(piece, sum());
      send_result(piece);
      receive_results(piece);
    }
    return std::move(schedule_);
  }

 private:
  int64_t encoded(int64_t bytes) const { return spec_.codec->encoded_bytes(bytes / kFloatBytes); }
  Region scratch(int64_t offset_bytes) const { return {.space = Space::kScratch, .offset_bytes = offset_bytes}; }
  Region outgoing() const { return scratch(0); }
  Region incoming() const { return scratch(encoded_bytes_); }
  Region sum() const { return scratch(2 * encoded_bytes_); }

  Range part(int32_t owner, int64_t piece) const {
    const auto [offset, bytes] = part_of(owned_[owner].bytes, piece_bytes_, piece);
    return {owned_[owner].offset_bytes + offset, bytes};
  }
  Region contribution(int32_t owner, int64_t piece) const {
    if (spec_.op == OpKind::kAllReduce) return input(part(owner, piece).offset_bytes);
    return input_block(spec_, owner, part(owner, piece).offset_bytes - owned_[owner].offset_bytes);
  }

  // Peers in turn, the next rank first: at any time every rank sends to another one.
  template <class Visit>
  void for_each_peer(Visit visit) const {
    for (int32_t distance = 1; distance < spec_.world_size; ++distance) {
      visit((spec_.rank + distance) % spec_.world_size);
    }
  }

  void contribute(int64_t piece) {
    for_each_peer([&](int32_t owner) {
      const auto [offset, bytes] = part(owner, piece);
      add_encode(schedule_, outgoing(), contribution(owner, piece), residual(spec_, kContributionHop, offset), bytes);
      add_send(schedule_, owner, outgoing(), encoded(bytes));
    });
  }

  // The result may be written over the input, so the sum grows in scratch.
  void collect(int64_t piece, Region destination) {
    const int64_t bytes = part(spec_.rank, piece).bytes;
    const Region mine = contribution(spec_.rank, piece);
    for (int32_t rank = 0; rank < spec_.world_size; ++rank) {
      if (rank == spec_.rank && rank == 0) {
        add_copy(schedule_, sum(), mine, bytes);
      } else if (rank == spec_.rank) {
        const std::vector<Region> sources{sum(), mine};
        add_reduce(schedule_, sum(), sources, bytes, ReduceScope::kOfRanks);
      } else {
        add_receive(schedule_, rank, incoming(), encoded(bytes));
        if (rank == 0) {
          add_decode(schedule_, sum(), incoming(), bytes);
        } else {
          add_decode_add(schedule_, sum(), incoming(), bytes);
        }
      }
    }
    const Region total = sum();
    add_reduce(schedule_, destination, {&total, 1}, bytes);
  }

  void send_result(int64_t piece) {
    const auto [offset, bytes] = part(spec_.rank, piece);
    add_encode(schedule_, outgoing(), sum(), residual(spec_, kResultHop, offset), bytes);
    for_each_peer([&](int32_t peer) { add_send(schedule_, peer, outgoing(), encoded(bytes)); });
    add_decode(schedule_, output(offset), outgoing(), bytes);
  }

  void receive_results(int64_t piece) {
    for_each_peer([&](int32_t owner) {
      const auto [offset, bytes] = part(owner, piece);
      add_receive(schedule_, owner, incoming(), encoded(bytes));
      add_decode(schedule_, output(offset), incoming(), bytes);
    });
  }

  const CollectiveSpec& spec_;
  const std::vector<Range> owned_;
  int64_t piece_bytes_ = 0;
  int64_t piece_count_ = 0;
  int64_t encoded_bytes_ = 0;  // room for the encoding of a piece
  Schedule schedule_;
};

}  // namespace

bool supports_compressed_exchange(const CollectiveSpec& spec) {
  return spec.codec != nullptr && is_one_node(spec) && (spec.world_size == 1 || largest_piece_bytes(spec) > 0);
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
  std::vector<Range> owned;
  for (int32_t rank = 0; rank < spec.world_size; ++rank) owned.push_back({rank * spec.bytes, spec.bytes});
  return Exchange(spec, kName, std::move(owned)).reduce_scatter();
}

// Encode what others own, decode what they send, reduce.
Cost cost_all_reduce_compressed(const CollectiveSpec& spec) {
  return {.barriers = 1, .memory_bytes = 6.0 * spec.bytes};
}

Cost cost_reduce_scatter_compressed(const CollectiveSpec& spec) {
  return {.barriers = 1, .memory_bytes = 4.0 * spec.world_size * spec.bytes};
}

}  // namespace zeropg

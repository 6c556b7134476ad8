// What a planner function is told about a collective. Plain data, the same on every rank but for `rank` and the
// all-to-all counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "backend/collectives/schedule/schedule.h"
#include "compression/compressor.h"

namespace zeropg {

enum class OpKind : uint8_t {  // a row of kOpTraits each, in this order
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kGather,
  kScatter,
  kBroadcast,
  kAllToAll,
  kBarrier,
};

// How many blocks of `bytes` a rank's tensor holds (where it has one: see has_root).
enum class BlockCount : uint8_t { kNone, kOne, kOnePerRank };
// Which ranks' tensors others reach where they lie when the operation runs directly (direct.h).
enum class DirectReach : uint8_t { kNone, kInputs, kRootInput, kBoth };

// What sets one operation apart from the others. Whoever needs to know asks here; only planners say which operation
// they plan.
struct OpTraits {
  const char* name;  // the word used in errors and statistics
  BlockCount input;
  BlockCount output;
  bool is_reducing;
  bool has_root;
  bool has_counts;  // blocks have a size of their own for each peer: CollectiveSpec::send_bytes and receive_bytes
  DirectReach direct;

  bool has_blocks() const { return input == BlockCount::kOnePerRank || output == BlockCount::kOnePerRank; }
};

// Conventions of the caller's tensors (each contiguous; `bytes` is the size of one block):
//   all_reduce      input[0], output[0] (may alias), `bytes` each
//   reduce          as all_reduce; only the root's output is written
//   reduce_scatter  one input of world_size blocks, or world_size inputs of one block (input_is_list); output[0] one
//                   block
//   all_gather      input[0] one block; one output of world_size blocks, or world_size outputs (output_is_list)
//   gather          as all_gather, output on the root only
//   scatter         as reduce_scatter without reduction, input on the root only
//   broadcast       the root's input[0]; output[0] on the others (the root's output aliases its input)
//   all_to_all      per-peer byte counts below; peers' blocks packed in rank order in input[0] / output[0], or as lists
//   barrier         nothing
// A list tensor is addressed by Region::index = peer, offset 0; a packed one by index 0, offset = sum of earlier
// blocks.
// clang-format off
inline constexpr OpTraits kOpTraits[] = {
    // name             input                    output                   reduces root   counts direct
    {"all_reduce",      BlockCount::kOne,        BlockCount::kOne,        true,   false, false, DirectReach::kBoth},
    {"reduce",          BlockCount::kOne,        BlockCount::kOne,        true,   true,  false, DirectReach::kNone},
    {"reduce_scatter",  BlockCount::kOnePerRank, BlockCount::kOne,        true,   false, false, DirectReach::kInputs},
    {"all_gather",      BlockCount::kOne,        BlockCount::kOnePerRank, false,  false, false, DirectReach::kInputs},
    {"gather",          BlockCount::kOne,        BlockCount::kOnePerRank, false,  true,  false, DirectReach::kNone},
    {"scatter",         BlockCount::kOnePerRank, BlockCount::kOne,        false,  true,  false, DirectReach::kNone},
    {"broadcast",       BlockCount::kOne,        BlockCount::kOne,        false,  true,  false, DirectReach::kRootInput},
    {"all_to_all",      BlockCount::kOnePerRank, BlockCount::kOnePerRank, false,  false, true,  DirectReach::kInputs},
    {"barrier",         BlockCount::kNone,       BlockCount::kNone,       false,  false, false, DirectReach::kNone},
};
// clang-format on
inline constexpr size_t kOpKindCount = std::size(kOpTraits);
static_assert(kOpKindCount == static_cast<size_t>(OpKind::kBarrier) + 1);

constexpr const OpTraits& traits_of(OpKind kind) { return kOpTraits[static_cast<size_t>(kind)]; }

inline constexpr int32_t kMostAnnouncedBlocks = 24;
inline constexpr int32_t kWholeShare = 1024;  // what CollectiveSpec::node_shares add up to

struct CollectiveSpec {
  OpKind op = OpKind::kBarrier;
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t root = 0;
  int32_t element_bytes = 1;
  int64_t bytes = 0;
  int64_t bank_bytes = 0;     // capacity of one bank of one rank's staging slot
  int64_t mailbox_bytes = 0;  // a rank may send this much to a peer before the peer receives
  bool input_is_list = false;
  bool output_is_list = false;
  bool has_node_output = false;          // all_gather: the ranks of a node may share one output (direct.h)
  std::vector<int64_t> send_bytes{};     // all_to_all: to each peer
  std::vector<int64_t> receive_bytes{};  // all_to_all: from each peer
  // Ranks of each node, ascending, nodes by their first rank. Empty: all ranks are on one node.
  std::vector<std::vector<int32_t>> nodes{};
  // What each node completes of what all nodes complete together, in 1/1024; the sum is 1024. Empty: equal shares.
  std::vector<int32_t> node_shares{};
  // The nodes of each rack, ascending, as indices into `nodes`; racks by their first node. Empty: there are none.
  std::vector<std::vector<int32_t>> racks{};
  // Of one node: the ranks of each domain, whose CPUs share a cache or the way to their memory, ordered as `nodes`.
  // Empty: all CPUs are alike.
  std::vector<std::vector<int32_t>> domains{};
  int32_t accumulator_bytes = 0;      // of an element of accumulator_dtype(); 0: element_bytes
  int64_t window_bytes = 0;           // as mailbox_bytes, to peers on other nodes
  const Compressor* codec = nullptr;  // of the hops between nodes (of all hops on one node); outlives the schedule
  bool has_residuals = false;         // Space::kResidual exists
};

// Of an all-to-all: whether ranks tell the whole node all their counts at the first barrier. In a larger world, where
// those do not fit, each pair compares its count in front of the bytes, as pairs of different nodes do in any.
inline bool announces_blocks(const CollectiveSpec& spec) {
  return traits_of(spec.op).has_counts && spec.world_size <= kMostAnnouncedBlocks;
}

}  // namespace zeropg

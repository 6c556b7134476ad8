#include "backend/engine/fingerprint_in_node.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backend/diagnostics/format_ranks.h"
#include "backend/group/call_fingerprint.h"
#include "backend/group/failure.h"

namespace zeropg {

namespace {

AnnouncedReduction announced_reduction(const PlannedCollective& collective) {
  AnnouncedReduction said{.factor = collective.factor.real(), .factor_imaginary = collective.factor.imag()};
  if (const Compressor* codec = collective.spec.codec) {
    codec->description().copy(said.codec, sizeof(said.codec) - 1);
  }
  return said;
}

static_assert(sizeof(AnnouncedBlocks) == Announcement::kInlineBytes);

}  // namespace

AnnouncedBlocks announced_blocks(const Announcement& said) {
  AnnouncedBlocks blocks;
  std::memcpy(&blocks, said.payload, sizeof(blocks));
  return blocks;
}

NodeFingerprints::NodeFingerprints(GroupContext& group, const PlannedCollective& collective,
                                   const OperationLabel& label, uint64_t sequence)
    : group_(group), collective_(collective), label_(label), sequence_(sequence) {}

void NodeFingerprints::announce_call() const {
  const CollectiveSpec& spec = collective_.spec;
  Announcement& said = mine();
  said.sequence = sequence_;
  said.op = static_cast<uint32_t>(spec.op);
  said.dtype = static_cast<uint32_t>(collective_.dtype_id);
  said.reduce_op = static_cast<uint32_t>(collective_.reduce_op);
  said.root = spec.root;
  said.bytes = spec.bytes;
  said.algorithm = hash_of(collective_.schedule->algorithm);
  if (announces_blocks(spec)) {
    AnnouncedBlocks blocks;
    std::ranges::copy(spec.send_bytes, blocks.sent);
    std::ranges::copy(spec.receive_bytes, blocks.received);
    std::memcpy(said.payload, &blocks, sizeof(blocks));
  } else {
    const AnnouncedReduction reduction = announced_reduction(collective_);
    std::memcpy(said.payload, &reduction, sizeof(reduction));
  }
}

void NodeFingerprints::compare_calls() const {
  const CollectiveSpec& spec = collective_.spec;
  const AnnouncedReduction mine = announced_reduction(collective_);
  const uint64_t algorithm = hash_of(collective_.schedule->algorithm);
  std::vector<int32_t> planned_otherwise;
  std::map<std::string, std::vector<int32_t>> calls;
  bool is_same = true;
  for (const int32_t peer : group_.node()) {
    const Announcement& other = of(peer);
    bool is_peer_same = other.op == static_cast<uint32_t>(spec.op) &&
                        other.dtype == static_cast<uint32_t>(collective_.dtype_id) &&
                        other.reduce_op == static_cast<uint32_t>(collective_.reduce_op) && other.root == spec.root &&
                        other.bytes == spec.bytes;
    if (is_peer_same && !announces_blocks(spec)) {
      is_peer_same = std::memcmp(other.payload, &mine, sizeof(mine)) == 0;
    }
    is_same = is_same && is_peer_same;
    if (other.algorithm != algorithm) {
      planned_otherwise.push_back(peer);
    }
  }
  if (is_same) {
    if (announces_blocks(spec)) {
      compare_blocks();
    }
    if (!planned_otherwise.empty()) {
      fail_operation(label_, "this rank runs ", collective_.schedule->algorithm, ", ", format_ranks(planned_otherwise),
                     " another algorithm; give BackendOptions(algorithms=...) and the version of zeropg the same value "
                     "on every rank.");
    }
    return;
  }
  for (const int32_t peer : group_.node()) {
    calls[describe_announcement(of(peer))].push_back(peer);
  }
  std::string text;
  for (const auto& [call, ranks] : calls) {
    text += (text.empty() ? "" : "; ") + format_ranks(ranks) + ": " + call;
  }
  fail_operation(label_, "the ranks made different calls: ", text,
                 "; make the same call with the same sizes on every rank.");
}

// Of all pairs of the node, so that no rank ends an operation that fails on others.
void NodeFingerprints::compare_blocks() const {
  const std::vector<int32_t>& ranks = group_.node();
  std::vector<AnnouncedBlocks> blocks;
  for (const int32_t rank : ranks) {
    blocks.push_back(announced_blocks(of(rank)));
  }
  const auto name = [&](int32_t rank) {
    return rank == group_.rank() ? std::string("this rank") : c10::str("rank ", rank);
  };
  for (size_t from = 0; from < ranks.size(); ++from) {
    for (size_t to = 0; to < ranks.size(); ++to) {
      const int64_t sent = blocks[from].sent[ranks[to]];
      const int64_t expected = blocks[to].received[ranks[from]];
      if (sent != expected) {
        fail_operation(label_, name(ranks[from]), " sends ", sent, " bytes to ", name(ranks[to]), ", which expects ",
                       expected, "; make the splits of both ranks match.");
      }
    }
  }
}

}  // namespace zeropg

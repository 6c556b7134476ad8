#include "backend/engine/fingerprint_in_node.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backend/diagnostics/format_ranks.h"
#include "backend/group/failure.h"

namespace zeropg {

AnnouncedBlocks Announcement::blocks() const {
  AnnouncedBlocks blocks;
  std::memcpy(&blocks, details, sizeof(blocks));
  return blocks;
}

std::string_view Announcement::codec() const {
  const auto* text = reinterpret_cast<const char*>(details);
  return call.codec == 0 ? std::string_view() : std::string_view(text, strnlen(text, sizeof(details)));
}

NodeFingerprints::NodeFingerprints(CollectiveContext& context, const PlannedCollective& collective,
                                   const CallFingerprint& call, const OperationLabel& label)
    : context_(context), collective_(collective), call_(call), label_(label) {}

Announcement& NodeFingerprints::of(int32_t peer) const {
  return *reinterpret_cast<Announcement*>(
      context_.arena.slot(context_.topology.local_rank[peer], call_.sequence).data());
}

void NodeFingerprints::announce_call() const {
  const CollectiveSpec& spec = collective_.spec;
  Announcement& said = mine();
  said.call = call_;
  if (announces_blocks(spec)) {
    AnnouncedBlocks blocks;
    std::ranges::copy(spec.send_bytes, blocks.sent);
    std::ranges::copy(spec.receive_bytes, blocks.received);
    std::memcpy(said.details, &blocks, sizeof(blocks));
  } else if (spec.codec != nullptr) {
    char text[sizeof(said.details)] = {};
    spec.codec->description().copy(text, sizeof(text) - 1);
    std::memcpy(said.details, text, sizeof(text));
  }
}

void NodeFingerprints::compare_calls() const {
  std::vector<int32_t> planned_otherwise;
  for (const int32_t peer : context_.topology.own_node()) {
    const CallDifference found = difference(of(peer).call, call_);
    if (found.is_senseless || found.in_call || found.in_codec) {
      throw_different_calls();
    }
    if (found.in_algorithm) {
      planned_otherwise.push_back(peer);
    }
  }
  if (announces_blocks(collective_.spec)) {
    compare_blocks();
  }
  if (!planned_otherwise.empty()) {
    fail_operation(label_, "this rank runs ", collective_.schedule->algorithm, ", ", format_ranks(planned_otherwise),
                   " another algorithm; give BackendOptions(algorithms=...) and the version of zeropg the same value "
                   "on every rank.");
  }
}

void NodeFingerprints::throw_different_calls() const {
  std::map<std::string, std::vector<int32_t>> calls;
  for (const int32_t peer : context_.topology.own_node()) {
    calls[describe_call(of(peer).call, of(peer).codec())].push_back(peer);
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
  const std::vector<int32_t>& ranks = context_.topology.own_node();
  std::vector<AnnouncedBlocks> blocks;
  for (const int32_t rank : ranks) {
    blocks.push_back(of(rank).blocks());
  }
  const auto name = [&](int32_t rank) {
    return rank == context_.topology.rank ? std::string("this rank") : c10::str("rank ", rank);
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

#include "backend/group/peers.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>

#include "backend/diagnostics/format_ranks.h"
#include "backend/group/failure.h"

namespace zeropg {

namespace {

std::vector<int32_t> common_ranks(const std::vector<int32_t>& one, const std::vector<int32_t>& other) {
  std::vector<int32_t> common;
  std::copy_if(one.begin(), one.end(), std::back_inserter(common),
               [&](int32_t rank) { return std::find(other.begin(), other.end(), rank) != other.end(); });
  return common;
}

}  // namespace

void Peers::throw_if_failed(const OperationLabel& label) {
  bool has_news = network_ != nullptr && network_->liveness().state_changes() > 0;
  for (const int32_t peer : topology_.own_node()) {
    has_news =
        has_news || (peer != topology_.rank && arena_.state_of(topology_.local_rank[peer]) == RankState::kFailed);
  }
  if (has_news) {
    throw_if_lost(label, states(), {});
  }
}

PeerStates Peers::states() {
  PeerStates states;
  const auto add = [&](int32_t peer, RankState state, const auto& failure) {
    if (state == RankState::kFailed && states.failed < 0) {
      states.failed = peer;
      states.failure = failure();
    } else if (state == RankState::kDeparted) {
      states.departed.push_back(peer);
    }
  };
  states.dead = dead_neighbours();
  for (int32_t peer = 0; peer < topology_.world_size(); ++peer) {
    if (peer == topology_.rank) {
      continue;
    }
    if (topology_.is_on_this_node(peer)) {
      const int32_t local = topology_.local_rank[peer];
      add(peer, arena_.state_of(local), [&] { return arena_.failure_of(local); });
      continue;
    }
    const RemoteState remote = network_->liveness().state_of(peer);
    add(peer, remote.state, [&] { return remote.failure; });
    if (remote.is_lost) {
      states.loss = states.dead.empty() ? remote.loss : states.loss;
      states.dead.push_back(peer);
    }
  }
  if (network_ != nullptr) {
    network_->ask_for_life(awaited_elsewhere({}));
  }
  return states;
}

// Asks the kernel now and then only: a progress thread that is woken often comes here as often.
std::vector<int32_t> Peers::dead_neighbours() {
  constexpr std::chrono::milliseconds kInterval{20};
  std::lock_guard<std::mutex> lock(liveness_mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look_ >= kInterval) {
    last_look_ = now;
    dead_.clear();
    for (const int32_t peer : topology_.own_node()) {
      const auto is_here = [&] {
        const RankState state = arena_.state_of(topology_.local_rank[peer]);
        return state != RankState::kDeparted && state != RankState::kFailed;
      };
      // Its state once more after that: it may have left between the two looks.
      if (peer != topology_.rank && is_here() && !arena_.is_process_alive(topology_.local_rank[peer]) && is_here()) {
        dead_.push_back(peer);
      }
    }
  }
  return dead_;
}

void throw_if_lost(const OperationLabel& label, const PeerStates& peers, const std::vector<int32_t>& awaited) {
  if (peers.failed >= 0) {
    throw OperationError({__func__, __FILE__, __LINE__},
                         {.kind = FailureKind::kPeer,
                          .text = c10::str(label.prefix(), ": rank ", peers.failed, " failed: ", peers.failure),
                          .cause = peers.failure});
  }
  const std::vector<int32_t> dead = common_ranks(peers.dead, awaited);
  if (!dead.empty() && !peers.loss.empty()) {
    fail_operation(label, "the connection to ", format_ranks(dead), " broke (", peers.loss,
                   "): the process died, or its machine or the network in between is gone; look there for an error,"
                   " then restart from a checkpoint.");
  }
  if (!dead.empty()) {
    fail_operation(label, "the process of ", format_ranks(dead),
                   " died; look for its error or a kill (out of memory?), then restart from a checkpoint.");
  }
  const std::vector<int32_t> departed = common_ranks(peers.departed, awaited);
  if (!departed.empty()) {
    fail_operation(label, format_ranks(departed),
                   " left the group (destroyed it or exited) while this rank waits for it; make the same calls on every"
                   " rank.");
  }
}

void Peers::tell_state(RankState state, const std::string& text) {
  arena_.set_state(state, text);
  if (network_ != nullptr) {
    network_->tell_state(state, text);
  }
}

std::string Peers::silence() const {
  constexpr std::chrono::milliseconds kLimit{1'000};
  if (network_ == nullptr) {
    return "";
  }
  const std::vector<int32_t> silent = network_->liveness().silent_for(kLimit);
  return silent.empty() ? "" : "; no sign of life from " + format_ranks(silent);
}

void Peers::note_wait(Lane lane, int32_t peer, const std::vector<int32_t>& awaited,
                      const std::optional<WaitingCall>& call, const std::vector<int32_t>& also_ask) {
  arena_.notes_of(arena_.rank()).note_wait(lane, peer == kAnybody ? topology_.world_size() : peer);
  if (network_ != nullptr) {
    network_->liveness().note_wait(lane, awaited, call);
    network_->ask_for_life(awaited_elsewhere(also_ask));
  }
}

WaitCulprits Peers::culprits_of(Lane lane, const std::vector<int32_t>& awaited) {
  return find_culprits(topology_.rank, awaited, [&](int32_t peer) { return awaited_by(peer, lane); });
}

// Note [Whose sign of life]
// Those on other nodes that this rank waits for, those that these wait for, and so on: they are who can hold it up.
// Whoever else lives or not is for those to notice who wait for it. So in a large group a rank asks a few, not all.
std::vector<int32_t> Peers::awaited_elsewhere(const std::vector<int32_t>& also) const {
  constexpr int32_t kMostAsked = 64;
  int32_t asked = 0;
  std::vector<int32_t> found;
  const auto add = [&](const std::vector<int32_t>& ranks) {
    for (const int32_t rank : ranks) {
      const bool is_new = rank != topology_.rank && std::find(found.begin(), found.end(), rank) == found.end();
      const bool is_elsewhere = !topology_.is_on_this_node(rank);
      if (!is_new || (is_elsewhere && network_->liveness().is_gone(rank))) continue;
      if (is_elsewhere && ++asked > kMostAsked) continue;
      found.push_back(rank);
    }
  };
  for (const Lane lane : {Lane::kCollective, Lane::kPointToPoint}) add(network_->liveness().own_waits(lane));
  add(also);
  for (size_t i = 0; i < found.size(); ++i) {
    for (const Lane lane : {Lane::kCollective, Lane::kPointToPoint}) add(awaited_by(found[i], lane));
  }
  std::erase_if(found, [&](int32_t rank) { return topology_.is_on_this_node(rank); });
  return found;
}

// A rank that waits in the other lane is no more to blame than one that waits in this one.
std::vector<int32_t> Peers::awaited_by(int32_t peer, Lane lane) const {
  const Lane other = lane == Lane::kCollective ? Lane::kPointToPoint : Lane::kCollective;
  if (!topology_.is_on_this_node(peer)) {
    const std::vector<int32_t> waits = network_->liveness().waits_of(peer, lane);
    return waits.empty() ? network_->liveness().waits_of(peer, other) : waits;
  }
  const int32_t local = topology_.local_rank[peer];
  const std::optional<int32_t> here = arena_.notes_of(local).wait(lane);
  const std::optional<int32_t> wait = here ? here : arena_.notes_of(local).wait(other);
  if (!wait) return {};
  const int32_t world_size = topology_.world_size();
  if (*wait == world_size) return topology_.others_than(peer);
  if (*wait != RankNotes::kAtBarrier) return *wait < world_size ? std::vector{*wait} : std::vector<int32_t>();
  return topology_.own_ranks(arena_.missing_for(local));
}

}  // namespace zeropg

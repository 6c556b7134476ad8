#include "backend/group/group_context.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "backend/diagnostics/format_ranks.h"
#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/transport/shm/shm_transport.h"

namespace zeropg {

namespace {

std::vector<int32_t> common_ranks(const std::vector<int32_t>& one, const std::vector<int32_t>& other) {
  std::vector<int32_t> common;
  std::copy_if(one.begin(), one.end(), std::back_inserter(common),
               [&](int32_t rank) { return std::find(other.begin(), other.end(), rank) != other.end(); });
  return common;
}

}  // namespace

GroupContext::GroupContext(BootstrapResult bootstrap, std::shared_ptr<const Hooks> hooks)
    : bootstrap_(std::move(bootstrap)),
      cma_peers_(static_cast<int32_t>(node().size())),
      owner_(::getpid()),
      hooks_(std::move(hooks)) {
  local_transport_ = std::make_unique<ShmTransport>(*bootstrap_.arena, node());
  cpu_balancer_ = std::make_unique<CpuBalancer>(*bootstrap_.arena);
}

GroupContext::~GroupContext() = default;

GroupContext::Use::Use(GroupContext& group, bool must_succeed) : group_(group) {
  if (!enter() && must_succeed) {
    throw OperationError({__func__, __FILE__, __LINE__}, group_.failure());
  }
}

bool GroupContext::Use::enter() {
  if (!is_given_) {
    group_.users_.fetch_add(1);
    is_given_ = true;
    if (group_.has_let_go_.load()) {
      leave();
    }
  }
  return is_given_;
}

void GroupContext::Use::leave() {
  if (std::exchange(is_given_, false) && group_.users_.fetch_sub(1) == 1 && group_.has_let_go_.load()) {
    group_.free_if_unused();
  }
}

void GroupContext::let_go() {
  has_let_go_ = true;
  free_if_unused();
}

void GroupContext::free_if_unused() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (users_.load() > 0) {
    return;  // who does not stay: it leaves without a look, or comes here
  }
  local_transport_.reset();
  cpu_balancer_.reset();
  bootstrap_.network.reset();
  bootstrap_.channel.reset();
  bootstrap_.pool.reset();
  bootstrap_.arena.reset();
}

bool GroupContext::is_own_process() const { return owner_ == ::getpid(); }

void GroupContext::fail(const Failure& failure) {
  const Use use(*this, /*must_succeed=*/false);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed_.load(std::memory_order_relaxed)) {
      return;
    }
    failure_ = failure;
    has_failed_.store(true, std::memory_order_release);
    tell_state(RankState::kFailed, failure.news());
  }
  if (hooks_->has_abort() && background_) {
    background_([hooks = hooks_, run = std::make_shared<RunsBeforeShutdown>()] { hooks->run_abort(); });
  }
}

Failure GroupContext::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void GroupContext::throw_if_failed() const {
  if (has_failed()) {
    throw OperationError({__func__, __FILE__, __LINE__}, failure());
  }
}

void GroupContext::throw_if_peer_failed(const OperationLabel& label) {
  bool has_news = network() != nullptr && network()->liveness().state_changes() > 0;
  for (const int32_t peer : node()) {
    has_news = has_news || (peer != rank() && arena().state_of(local_rank(peer)) == RankState::kFailed);
  }
  if (has_news) {
    throw_if_lost(label, peer_states(), {});
  }
}

PeerStates GroupContext::peer_states() {
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
  for (int32_t peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) {
      continue;
    }
    if (is_on_this_node(peer)) {
      const int32_t local = local_rank(peer);
      add(peer, arena().state_of(local), [&] { return arena().failure_of(local); });
      continue;
    }
    const RemoteState remote = network()->liveness().state_of(peer);
    add(peer, remote.state, [&] { return remote.failure; });
    if (remote.is_lost) {
      states.loss = states.dead.empty() ? remote.loss : states.loss;
      states.dead.push_back(peer);
    }
  }
  if (network() != nullptr) {
    network()->ask_for_life();
  }
  return states;
}

// Asks the kernel now and then only: a progress thread that is woken often comes here as often.
std::vector<int32_t> GroupContext::dead_neighbours() {
  constexpr std::chrono::milliseconds kInterval{20};
  std::lock_guard<std::mutex> lock(liveness_mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look_ >= kInterval) {
    last_look_ = now;
    dead_.clear();
    for (const int32_t peer : node()) {
      const auto is_here = [&] {
        const RankState state = arena().state_of(local_rank(peer));
        return state != RankState::kDeparted && state != RankState::kFailed;
      };
      // Its state once more after that: it may have left between the two looks.
      if (peer != rank() && is_here() && !arena().is_process_alive(local_rank(peer)) && is_here()) {
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

void GroupContext::depart() {
  const Use use(*this, /*must_succeed=*/false);
  std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed_.load(std::memory_order_relaxed)) {
    return;
  }
  failure_ = {.text = c10::str("[zeropg rank ", rank(), "/", world_size(),
                               "] the process group was shut down; make a new one to communicate again.")};
  has_failed_.store(true, std::memory_order_release);
  tell_state(RankState::kDeparted);
}

// Under the lock: who closes the group takes it first (in depart), and so closes no connection before the peers are
// told.
void GroupContext::tell_state(RankState state, const std::string& message) {
  arena().set_state(state, message);
  if (network() != nullptr) {
    network()->tell_state(state, message);
  }
}

std::string GroupContext::who_is_late() {
  const Use use(*this, /*must_succeed=*/false);
  if (!use) {
    return "";
  }
  const std::vector<int32_t> missing = missing_at(barriers_.load(std::memory_order_relaxed));
  return missing.empty() ? std::string() : "waiting for " + format_ranks(missing);
}

std::vector<int32_t> GroupContext::missing_at(uint64_t barrier) const {
  std::vector<int32_t> missing = bootstrap_.arena->missing(barrier);
  for (int32_t& peer : missing) {
    peer = node()[peer];
  }
  return missing;
}

std::string GroupContext::silence() const {
  constexpr std::chrono::milliseconds kLimit{1'000};
  if (bootstrap_.network == nullptr) {
    return "";
  }
  const std::vector<int32_t> silent = bootstrap_.network->liveness().silent_for(kLimit);
  return silent.empty() ? "" : "; no sign of life from " + format_ranks(silent);
}

std::vector<int32_t> GroupContext::others_than(int32_t rank) const {
  std::vector<int32_t> ranks(static_cast<size_t>(world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::erase(ranks, rank);
  return ranks;
}

void GroupContext::note_wait(Lane lane, int32_t peer, const std::vector<int32_t>& awaited,
                             const std::optional<WaitingCall>& call) {
  arena().note_wait(lane, peer == kAnybody ? world_size() : peer);
  if (network() != nullptr) {
    network()->note_wait(lane, awaited, call);
  }
}

WaitCulprits GroupContext::culprits_of(Lane lane, const std::vector<int32_t>& awaited) {
  // A rank that waits in the other lane is no more to blame than one that waits in this one.
  const Lane other = lane == Lane::kCollective ? Lane::kPointToPoint : Lane::kCollective;
  return find_culprits(rank(), awaited, [&](int32_t peer) -> std::vector<int32_t> {
    if (!is_on_this_node(peer)) {
      const std::vector<int32_t> waits = network()->liveness().waits_of(peer, lane);
      return waits.empty() ? network()->liveness().waits_of(peer, other) : waits;
    }
    const int32_t local = local_rank(peer);
    const std::optional<int32_t> here = arena().wait_of(local, lane);
    const std::optional<int32_t> wait = here ? here : arena().wait_of(local, other);
    if (!wait) return {};
    if (*wait == world_size()) return others_than(peer);
    if (*wait != ShmArena::kAtBarrier) return *wait < world_size() ? std::vector{*wait} : std::vector<int32_t>();
    std::vector<int32_t> missing = arena().missing_for(local);
    for (int32_t& late : missing) late = node()[late];
    return missing;
  });
}

std::byte* GroupContext::scratch(int64_t bytes) {
  constexpr size_t kAlignment = 64;
  const size_t needed = static_cast<size_t>(bytes) + kAlignment;
  if (scratch_.size() < needed) {
    scratch_ = std::vector<std::byte>(needed);
  }
  const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
  return scratch_.data() + (kAlignment - address % kAlignment) % kAlignment;
}

void GroupContext::retire(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  retired_.push_back(std::move(work));
}

void GroupContext::release_retired() {
  std::vector<c10::intrusive_ptr<c10d::Work>> retired;
  std::lock_guard<std::mutex> lock(mutex_);
  retired.swap(retired_);
}

void GroupContext::count(const OperationLabel& label, double seconds, const std::vector<double>& waiting_seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  OperationStatistics& statistics = statistics_[label.name()];
  ++statistics.calls;
  statistics.bytes += label.bytes;
  statistics.seconds += seconds;
  statistics.waiting_seconds.resize(world_size());
  for (size_t peer = 0; peer < waiting_seconds.size(); ++peer) {
    statistics.waiting_seconds[peer] += waiting_seconds[peer];
  }
}

void GroupContext::count_waiting(const OperationLabel& label, int32_t peer, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  OperationStatistics& statistics = statistics_[label.name()];
  statistics.waiting_seconds.resize(world_size());
  statistics.waiting_seconds[static_cast<size_t>(peer)] += seconds;
}

void GroupContext::count_direct(const OperationLabel& label) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++statistics_[label.name()].direct_calls;
}

std::map<std::string, OperationStatistics> GroupContext::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

}  // namespace zeropg

#include "backend/process_group/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/bootstrap/bootstrap.h"
#include "backend/diagnostics/group_members.h"
#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/platform/process/signal_check.h"

namespace zeropg {

namespace {

constexpr std::chrono::milliseconds kShutdownPatience{5'000};
constexpr std::chrono::milliseconds kExitPatience{1'000};
constexpr std::chrono::milliseconds kHookPatience{20'000};  // torch gives up its own dump after 15 s

c10::intrusive_ptr<BackendOptions> resolved(const c10::intrusive_ptr<BackendOptions>& options) {
  auto copy = c10::make_intrusive<BackendOptions>(*options);
  copy->resolve();
  return copy;
}

std::shared_ptr<GroupContext> join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         const char* members, const BackendOptions& options,
                                         std::chrono::milliseconds timeout, std::shared_ptr<const Hooks> hooks) {
  BootstrapResult joined = bootstrap(store, rank, size,
                                     BootstrapOptions{.timeout = timeout,
                                                      .members = members,
                                                      .secret = options.secret,
                                                      .host_id = options.host_id,
                                                      .domain_id = options.domain_id,
                                                      .rack_id = options.rack_id,
                                                      .topology_file = options.topology_file,
                                                      .known_links = options.known_links,
                                                      .measures_links = options.measure_links,
                                                      .bank_bytes = options.bank_bytes,
                                                      .mailbox_bytes = options.mailbox_bytes,
                                                      .pool_bytes = options.pool_bytes,
                                                      .window_bytes = options.window_bytes,
                                                      .network = options.network,
                                                      .library_root = options.ucx_root,
                                                      .authenticates_frames = options.authenticate_frames,
                                                      .connections = options.connections,
                                                      .interfaces = InterfaceRules(options.interfaces),
                                                      .ports = parse_ports(options.ports)});
  return std::make_shared<GroupContext>(std::move(joined), std::move(hooks));
}

// Whether the ranks meet only when torch.distributed's reconfigure is called.
bool is_joined_later(const BackendOptions& options) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  return options.enable_reconfigure;
#else
  return false;
#endif
}

}  // namespace

ProcessGroupZero::ProcessGroupZero(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const c10::intrusive_ptr<BackendOptions>& options, BackendFactory make_cuda_backend)
    : Backend(rank, size),
      first_store_(store),
      store_(store),
      options_(resolved(options)),
      timeouts_(options_->timeout),
      has_cuda_(make_cuda_backend != nullptr),
      make_cuda_backend_(std::move(make_cuda_backend)) {
  init();
  if (!is_joined_later(*options_)) {
    join(options_->timeout);
  }
}

void ProcessGroupZero::join(std::chrono::milliseconds timeout) {
  members_ = describe_members(options_->global_ranks_in_group);
  // Before the group is joined: a wrong option must not leave peers waiting in a group that half exists.
  auto planner =
      std::make_shared<Planner>(PlannerOptions{.rank = rank_,
                                               .world_size = size_,
                                               .bank_bytes = options_->bank_bytes,
                                               .mailbox_bytes = options_->mailbox_bytes,
                                               .window_bytes = shared_window_bytes(options_->window_bytes, size_),
                                               .cma = options_->cma,
                                               .algorithms = options_->algorithms});
  auto channels = GroupRuntime::open(join_group(c10::make_intrusive<c10d::PrefixStore>("zeropg", store_), rank_, size_,
                                                members_, *options_, timeout, hooks_),
                                     options_->cma);
  const Topology& topology = channels->group().topology();
  if (topology.is_one_node()) {
    planner->set_domains(topology.domains[0]);
  } else {
    planner->set_nodes(topology.nodes);
    planner->set_links(topology.racks, topology.links);
  }
  planner->set_rings(channels->group().arena().geometry().mailbox_bytes);
  planner->set_pool(*channels->group().pool());
  if (topology.links.is_followed) channels->collectives()->watch_links(planner);
  std::lock_guard<std::mutex> lock(membership_mutex_);
  planner_ = std::move(planner);
  channels_ = std::move(channels);
  sequence_ = 0;
  messages_ = 0;
  monitored_count_ = 0;
}

GroupContext& ProcessGroupZero::group() const {
  TORCH_CHECK_WITH(DistBackendError, channels_ != nullptr, "[zeropg rank ", rank_, "/", size_,
                   "] the group was made with enable_reconfigure and has no members yet; call reconfigure first.");
  return channels_->group();
}

Topology ProcessGroupZero::topology() const {
  Topology topology = group().topology();
  topology.links = planner_->links();
  return topology;
}

KnownLinks ProcessGroupZero::known_links() const {
  std::lock_guard<std::mutex> lock(membership_mutex_);
  return channels_ == nullptr ? KnownLinks() : zeropg::known_links(topology());
}

std::vector<AlgorithmEstimate> ProcessGroupZero::estimates(const std::string& operation, int64_t bytes) const {
  const auto traits = std::find_if(std::begin(kOpTraits), std::end(kOpTraits),
                                   [&](const OpTraits& known) { return operation == known.name; });
  TORCH_CHECK_VALUE(traits != std::end(kOpTraits) && bytes >= 0, prefix("zeropg:estimates"), ": there is no operation ",
                    operation, " of ", bytes, " bytes; use names like all_reduce and a size that is not negative.");
  group();  // there must be one
  return planner_->estimates(static_cast<OpKind>(traits - std::begin(kOpTraits)), bytes);
}

std::shared_ptr<GroupRuntime> ProcessGroupZero::current_channels() const {
  std::lock_guard<std::mutex> lock(membership_mutex_);
  return channels_;
}

ProcessGroupZero::~ProcessGroupZero() {
  if (channels_ != nullptr && group().is_own_process()) {
    channels_->close(kShutdownPatience);
    group().retired_works().release();
  }
}

void ProcessGroupZero::shutdown() {
  if (const auto channels = current_channels()) {
    channels->close(kShutdownPatience);
  }
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (cuda_backend_) {
    cuda_backend_->shutdown();
  }
  make_cuda_backend_ = nullptr;
}

void ProcessGroupZero::shutdown_all() {
  // Somebody may also wait for a future of what still runs.
  const bool may_somebody_wait = has_waiting_threads() || !GroupRuntime::are_all_idle();
  GroupRuntime::close_all(kExitPatience);
  if (may_somebody_wait || has_waiting_threads()) {
    release_waiting_threads(kExitPatience);
  }
  wait_for_runs_before_shutdown(kHookPatience);
}

void ProcessGroupZero::fail(const std::string& why) {
  const GroupContext::Use use(group(), /*must_succeed=*/false);
  if (use) group().fail({.text = why});
}

void ProcessGroupZero::abort() {
  const auto channels = current_channels();
  if (channels == nullptr || !channels->group().is_own_process()) {
    return;
  }
  channels->group().fail(
      {.text = c10::str("[zeropg rank ", rank_, "/", size_, "] the process group was aborted; make a new one.")});
  channels->abort();
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (cuda_backend_) {
    cuda_backend_->abort();
  }
}

std::string ProcessGroupZero::prefix(const char* title) const {
  return OperationLabel{.rank = rank_, .world_size = size_, .members = members_, .title = title}.prefix();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupZero::getBackendOptions() {
  auto options = c10::make_intrusive<BackendOptions>(*options_);
  options->timeout = timeouts_.get();
  return options;
}

void ProcessGroupZero::waitForPendingWorks() {
  const std::chrono::milliseconds timeout = timeouts_.get();
  group();  // there must be one
  TORCH_CHECK_WITH(DistBackendError, channels_->wait_until_idle(timeout), prefix("zeropg:wait_for_pending_works"),
                   ": operations still run after ", timeout.count(), " ms; wait for their Works to see which.");
}

void ProcessGroupZero::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "[zeropg rank ", rank_, "/", size_, "] set_timeout: got ", timeout.count(),
                    " ms, expected a positive time.");
  timeouts_.set(timeout);
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (cuda_backend_) {
    cuda_backend_->setTimeout(timeout);
  }
}

c10d::ErrorType ProcessGroupZero::getError() {
  {
    std::lock_guard<std::mutex> lock(inner_mutex_);
    if (cuda_backend_ && cuda_backend_->getError() != c10d::ErrorType::SUCCESS) {
      return cuda_backend_->getError();
    }
  }
  const auto channels = current_channels();
  if (channels == nullptr || !channels->group().has_failed() || channels->was_shut_down()) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (channels->group().failure().kind) {
    case FailureKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case FailureKind::kPeer:
      return c10d::ErrorType::REMOTE_ERROR;
    case FailureKind::kHere:
      break;
  }
  return c10d::ErrorType::COMM_ERROR;
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroupZero::registerAbortHook(int64_t id, c10d::AbortHook hook) { hooks_->set_abort(id, std::move(hook)); }

void ProcessGroupZero::unregisterAbortHook(int64_t id) { hooks_->set_abort(id, nullptr); }

void ProcessGroupZero::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->set_completion(id, [hook = std::move(hook)](uint64_t key, float duration_ms) {
    hook(c10d::CompletionHookArgs{.completionKey = key, .duration_ms = duration_ms});
  });
}

void ProcessGroupZero::unregisterCompletionHook(int64_t id) { hooks_->set_completion(id, nullptr); }
#endif

void ProcessGroupZero::check_peer(const char* title, int32_t peer) {
  const GroupContext::Use use(group());
  group().throw_if_failed();
  if (!group().topology().is_on_this_node(peer)) group().network()->ask_for_life({peer});
  throw_if_lost(OperationLabel{.rank = rank_, .world_size = size_, .members = members_, .title = title},
                group().peers().states(), {peer});
}

std::shared_ptr<SharedSegment> ProcessGroupZero::allocate_shared(int64_t bytes_per_rank) {
  const Topology& topology = group().topology();
  const auto local_world_size = static_cast<int32_t>(topology.own_node().size());
  const std::chrono::milliseconds timeout = timeouts_.get();
  run_barrier("zeropg:allocate_shared", bytes_per_rank, timeout, /*is_asynchronous=*/false);  // compares the sizes
  OperationLabel label{.rank = rank_, .world_size = size_, .title = "zeropg:shared_segment"};
  const GroupContext::Use use(group());
  const auto look_after_leader = [&] {
    check_signals();
    group().throw_if_failed();
    PeerStates peers = group().peers().states();
    peers.departed.clear();  // it may have sent the memory before it left
    throw_if_lost(label, peers, {topology.own_node().front()});
  };
  const int fd = share_descriptor(
      group().descriptors(), [&] { return SharedSegment::create(local_world_size, bytes_per_rank); }, timeout,
      look_after_leader);
  return std::make_shared<SharedSegment>(
      fd, topology.local_rank[rank_], local_world_size, bytes_per_rank,
      [group = channels_->shared_group(), label](int32_t awaited) {
        check_signals();
        const GroupContext::Use use(*group);
        group->throw_if_failed();
        const PeerStates peers = group->peers().states();
        std::vector<int32_t> needed = peers.dead;  // others may leave while ranks still read what they published
        needed.push_back(group->topology().own_node()[static_cast<size_t>(awaited)]);
        throw_if_lost(label, peers, needed);
      });
}

}  // namespace zeropg

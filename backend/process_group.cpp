#include "backend/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "backend/bootstrap.h"

namespace zeropg {

namespace {

constexpr std::chrono::milliseconds kShutdownPatience{5'000};
constexpr std::chrono::milliseconds kGoodbyePatience{2'000};  // for the last bytes to reach other nodes
constexpr std::chrono::milliseconds kExitPatience{1'000};
constexpr std::chrono::milliseconds kFailPatience{2'000};  // for operations to fail once their group is closed

// The groups of this process, so that the interpreter's exit can join what they run; nothing else reads it.
struct LiveGroups {
  std::mutex mutex;
  std::vector<ProcessGroupZero*> groups;  // guarded by mutex
};
LiveGroups& live_groups() {
  static auto* live = new LiveGroups();  // never destroyed: groups may outlive static destructors
  return *live;
}

c10::intrusive_ptr<BackendOptions> resolved(const c10::intrusive_ptr<BackendOptions>& options) {
  auto copy = c10::make_intrusive<BackendOptions>(*options);
  copy->resolve();
  return copy;
}

std::shared_ptr<Group> join_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const BackendOptions& options) {
  BootstrapResult joined = bootstrap(store, rank, size,
                                     BootstrapOptions{.timeout = options.timeout,
                                                      .secret = options.secret,
                                                      .host_id = options.host_id,
                                                      .bank_bytes = options.bank_bytes,
                                                      .mailbox_bytes = options.mailbox_bytes,
                                                      .window_bytes = options.window_bytes,
                                                      .network = options.network,
                                                      .interfaces = options.interfaces});
  return std::make_shared<Group>(std::move(joined));
}

}  // namespace

ProcessGroupZero::ProcessGroupZero(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const c10::intrusive_ptr<BackendOptions>& options, BackendFactory make_cuda_backend)
    : Backend(rank, size),
      options_(resolved(options)),
      // Before the group is joined: a wrong option must not leave peers waiting in a group that half exists.
      planner_({.rank = rank,
                .world_size = size,
                .bank_bytes = options_->bank_bytes,
                .mailbox_bytes = options_->mailbox_bytes,
                .window_bytes = options_->window_bytes,
                .algorithms = options_->algorithms}),
      group_(join_group(store, rank, size, *options_)),
      engine_(Engine::of_this_process()),
      collectives_(group_, engine_),
      messages_(group_, engine_),
      network_(group_, engine_),
      timeout_ms_(options_->timeout.count()),
      has_cuda_(make_cuda_backend != nullptr),
      make_cuda_backend_(std::move(make_cuda_backend)) {
  init();
  if (!is_one_node()) {
    planner_.set_nodes(group_->topology().nodes);
  }
  engine_.add(&collectives_);
  engine_.add(&messages_);
  callbacks_ = engine_.callbacks();
  group_->set_background([callbacks = callbacks_](std::function<void()> run) { callbacks->post(std::move(run)); });
  std::lock_guard<std::mutex> lock(live_groups().mutex);
  live_groups().groups.push_back(this);
}

ProcessGroupZero::~ProcessGroupZero() {
  if (!group_->is_own_process()) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(live_groups().mutex);
    std::erase(live_groups().groups, this);
  }
  close(kShutdownPatience);
  group_->release_retired();
}

void ProcessGroupZero::close(std::chrono::milliseconds patience) {
  if (!group_->is_own_process() || is_closed_.exchange(true)) {
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  const auto time_left = [&] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  };
  if (!group_->has_failed()) {
    collectives_.wait_until_idle(time_left());
    messages_.wait_until_idle(time_left());
  }
  group_->depart();
  constexpr std::chrono::milliseconds kNow{0};
  if (!collectives_.wait_until_idle(kNow) || !messages_.wait_until_idle(kNow)) {
    engine_.wake();  // fails what is left
    collectives_.wait_until_idle(kFailPatience);
    messages_.wait_until_idle(kFailPatience);
  }
  engine_.remove(&collectives_);
  engine_.remove(&messages_);
  network_.close(kGoodbyePatience);
  group_->release_retired();
}

void ProcessGroupZero::shutdown() {
  close(kShutdownPatience);
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (cuda_backend_) {
    cuda_backend_->shutdown();
  }
  make_cuda_backend_ = nullptr;
}

void ProcessGroupZero::shutdown_all() {
  std::lock_guard<std::mutex> lock(live_groups().mutex);
  for (ProcessGroupZero* group : live_groups().groups) {
    group->close(kExitPatience);
  }
}

void ProcessGroupZero::abort() {
  if (!group_->is_own_process()) {
    return;
  }
  group_->fail(c10::str("[zeropg rank ", rank_, "/", size_, "] the process group was aborted; make a new one."));
  if (!is_closed_) {
    engine_.wake();
  }
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (cuda_backend_) {
    cuda_backend_->abort();
  }
}

void ProcessGroupZero::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "[zeropg rank ", rank_, "/", size_, "] set_timeout: got ", timeout.count(),
                    " ms, expected a positive time.");
  options_->timeout = timeout;
  timeout_ms_ = timeout.count();
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
  if (!group_->has_failed() || is_closed_) {
    return c10d::ErrorType::SUCCESS;
  }
  const std::string failure = group_->failure();
  if (failure.find("timed out") != std::string::npos) {
    return c10d::ErrorType::TIMEOUT;
  }
  return failure.find(" failed: ") != std::string::npos ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

c10d::Backend* ProcessGroupZero::inner_for(const c10::Device& device) {
  if (!device.is_cuda()) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (!cuda_backend_) {
    TORCH_CHECK_NOT_IMPLEMENTED(make_cuda_backend_, "[zeropg rank ", rank_, "/", size_, "] a tensor is on ", device,
                                ", but this group has no NCCL; use a torch that was built with it.");
    cuda_backend_ = make_cuda_backend_();
    cuda_backend_->setGroupUid(getGroupUid());
    cuda_backend_->setGroupDesc(getGroupDesc());
  }
  if (is_coalescing_ && !is_cuda_coalescing_) {
    cuda_backend_->startCoalescing();
    is_cuda_coalescing_ = true;
  }
  return cuda_backend_.get();
}

// c10d does not say for which device the window is: the first CUDA tensor in it opens NCCL's.
void ProcessGroupZero::startCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::endCoalescing() {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  is_coalescing_ = false;
  if (std::exchange(is_cuda_coalescing_, false)) {
    if (auto work = cuda_backend_->endCoalescing()) {
      coalesced_.push_back(std::move(work));
    }
  }
  return coalesced_.size() == 1 ? std::exchange(coalesced_, {})[0] : combine(std::exchange(coalesced_, {}));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::coalesce(c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(inner_mutex_);
  if (is_coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroupZero::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  group_->set_completion_hook(id, [hook = std::move(hook)](uint64_t key, float duration_ms) {
    hook(c10d::CompletionHookArgs{.completionKey = key, .duration_ms = duration_ms});
  });
}
#endif

std::shared_ptr<SharedSegment> ProcessGroupZero::allocate_shared(int64_t bytes_per_rank) {
  if (!is_one_node()) {
    return nullptr;
  }
  const std::chrono::milliseconds timeout(timeout_ms_.load());
  run_barrier("zeropg:allocate_shared", bytes_per_rank, timeout, /*is_asynchronous=*/false);  // compares the sizes
  const int fd = share_descriptor(
      group_->descriptors(), [&] { return SharedSegment::create(size_, bytes_per_rank); }, timeout);
  OperationLabel label{.rank = rank_, .world_size = size_, .title = "zeropg:shared_segment"};
  return std::make_shared<SharedSegment>(fd, rank_, size_, bytes_per_rank, [group = group_, label](int32_t awaited) {
    group->throw_if_failed();
    const PeerStates peers = group->peer_states();
    std::vector<int32_t> needed = peers.dead;  // others may leave while ranks still read what they published
    needed.push_back(awaited);
    throw_if_lost(label, peers, needed);
  });
}

}  // namespace zeropg

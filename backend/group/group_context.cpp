#include "backend/group/group_context.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <utility>

#include "backend/platform/process/interpreter_shutdown.h"
#include "backend/transport/shm/shm_transport.h"

namespace zeropg {

GroupContext::GroupContext(BootstrapResult bootstrap, std::shared_ptr<const Hooks> hooks)
    : bootstrap_(std::move(bootstrap)), owner_(::getpid()), hooks_(std::move(hooks)) {
  local_transport_ = std::make_unique<ShmTransport>(*bootstrap_.arena, topology().own_node());
  cpu_balancer_ = std::make_unique<CpuBalancer>(*bootstrap_.arena);
  peers_ = std::make_unique<Peers>(bootstrap_.topology, *bootstrap_.arena, bootstrap_.network.get());
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
  peers_.reset();
  local_transport_.reset();
  cpu_balancer_.reset();
  bootstrap_.network.reset();
  bootstrap_.channel.reset();
  bootstrap_.pool.reset();
  bootstrap_.arena.reset();
}

bool GroupContext::is_own_process() const { return owner_ == ::getpid(); }

// Peers are told under the lock: who closes the group takes it first (in depart), and so closes no connection before
// they are.
void GroupContext::fail(const Failure& failure) {
  const Use use(*this, /*must_succeed=*/false);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed_.load(std::memory_order_relaxed)) {
      return;
    }
    failure_ = failure;
    has_failed_.store(true, std::memory_order_release);
    peers_->tell_state(RankState::kFailed, failure.news());
  }
  if (!failure.is_wanted && hooks_->has_abort() && background_) {
    run_in_background([hooks = hooks_, run = std::make_shared<RunsBeforeShutdown>()] { hooks->run_abort(); });
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

void GroupContext::depart() {
  const Use use(*this, /*must_succeed=*/false);
  std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed_.load(std::memory_order_relaxed)) {
    return;
  }
  failure_ = {.text = c10::str("[zeropg rank ", rank(), "/", world_size(),
                               "] the process group was shut down; make a new one to communicate again.")};
  has_failed_.store(true, std::memory_order_release);
  peers_->tell_state(RankState::kDeparted);
}

void check_own_process(const GroupContext& group, const OperationLabel& label) {
  TORCH_CHECK_WITH(DistBackendError, group.is_own_process(), label.prefix(),
                   ": this operation belongs to the parent of this forked process; wait for it there.");
}

}  // namespace zeropg

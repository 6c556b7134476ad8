#include "backend/process_group/group_runtime.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "backend/platform/process/interpreter_shutdown.h"

namespace zeropg {

namespace {

constexpr std::chrono::milliseconds kNow{0};
constexpr std::chrono::milliseconds kListeningPatience{1'000};  // with receives that nobody waits for
constexpr std::chrono::milliseconds kFailPatience{2'000};       // for operations to fail once their group is closed
constexpr std::chrono::milliseconds kGoodbyePatience{2'000};    // for the last bytes to reach other nodes
constexpr std::chrono::milliseconds kAbortGoodbyePatience{500};

// What is open in this process, so that the interpreter's exit can join what it runs; nothing else reads it.
struct OpenChannels {
  std::mutex mutex;
  std::vector<std::weak_ptr<GroupRuntime>> channels;  // guarded by mutex
};

OpenChannels& open_channels() {
  static auto* open = new OpenChannels();  // never destroyed: groups may outlive static destructors
  return *open;
}

// They move also while no operation of this rank waits: peers say that they fail or leave.
//
// Note [Attended connections]
// A thread that waits for an operation reads from its peers itself, to where the bytes belong. If the progress thread
// were woken by the same bytes, the two would read in turns: each takes the CPU and the lock from the other, and what
// the progress thread reads is copied twice. (64 MiB between two nodes over links without a limit: 42 ms instead of
// 30.) So while all that is under way in a group has a thread that waits for it, the progress thread only looks in
// every 10 ms, for what other peers say and for those who call this rank for the first time, whose handshake takes a
// few looks. A thread that leaves rings where some bytes are not sent yet.
class Connections final : public Channel {
 public:
  Connections(GroupContext& group, const CollectiveQueue& collectives, const PointToPoint& messages)
      : group_(group), collectives_(collectives), messages_(messages) {}

  Activity advance_on_engine_thread() override {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_look_ < kLookInterval && are_attended()) return Activity::kIdle;
    last_look_ = now;
    try {
      return group_.network()->progress() ? Activity::kMoved : Activity::kIdle;
    } catch (const std::bad_alloc&) {  // for bytes that nobody here waits for
      group_.fail({.text = c10::str("[zeropg rank ", group_.rank(), "/", group_.world_size(),
                                    "] this rank has no memory left for what other ranks send; look at `ulimit -v` and"
                                    " at what else the process keeps.")});
      return Activity::kIdle;
    }
  }
  void check_on_engine_thread() override {}
  void set_sleeping(bool /*is_sleeping*/) override {}
  Sleep sleep() const override {
    return are_attended() ? Sleep{.limit = kLookInterval} : Sleep{.descriptor = group_.network()->descriptor()};
  }
  bool arm() override { return group_.network()->arm(); }
  int32_t local_world_size() const override { return static_cast<int32_t>(group_.topology().own_node().size()); }

 private:
  static constexpr std::chrono::milliseconds kLookInterval{10};

  bool are_attended() const {
    return (collectives_.is_waited_for() || messages_.is_waited_for()) && !collectives_.is_left_to_engine() &&
           !messages_.is_left_to_engine();
  }

  GroupContext& group_;
  const CollectiveQueue& collectives_;
  const PointToPoint& messages_;
  std::chrono::steady_clock::time_point last_look_{};
};

}  // namespace

GroupRuntime::GroupRuntime(std::shared_ptr<GroupContext> group, bool may_use_cma)
    : group_(std::move(group)),
      engine_(ProgressEngine::of_this_process()),
      collectives_(std::make_shared<CollectiveQueue>(group_, engine_)),
      messages_(std::make_shared<PointToPoint>(group_, engine_, may_use_cma)),
      window_traffic_(group_->network() == nullptr ? nullptr : std::make_unique<WindowTraffic>(group_, engine_)),
      connections_(group_->network() == nullptr ? nullptr
                                                : std::make_unique<Connections>(*group_, *collectives_, *messages_)) {
  engine_.add(channels());
  engine_.wake();  // peers may have spoken already
  group_->set_background(
      [callbacks = engine_.callbacks()](std::function<void()> run) { callbacks->post(std::move(run)); });
}

std::vector<Channel*> GroupRuntime::channels() {
  std::vector<Channel*> channels{collectives_.get(), messages_.get()};
  if (connections_ != nullptr) {
    channels.push_back(window_traffic_.get());
    channels.push_back(connections_.get());  // behind who knows where bytes belong: Note [Bytes in place]
  }
  return channels;
}

std::shared_ptr<GroupRuntime> GroupRuntime::open(std::shared_ptr<GroupContext> group, bool may_use_cma) {
  std::shared_ptr<GroupRuntime> channels;
  try {
    channels.reset(new GroupRuntime(group, may_use_cma));
  } catch (const std::system_error& error) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NPROC, &limit);
    const std::string own = limit.rlim_cur == RLIM_INFINITY ? "any number" : std::to_string(limit.rlim_cur);
    const std::string text = c10::str(
        "[zeropg rank ", group->rank(), "/", group->world_size(),
        "] the group needs a thread that runs its operations,"
        " and this process can start none (",
        error.what(), "): its user may have ", own,
        " of processes and threads (ulimit -u), its container as many as pids.max in its control group says, and one of"
        " the two is used up; raise that limit, or end what takes so many, and make the group again.");
    group->fail({.text = text});  // the others have the group and would wait for this rank
    if (group->network() != nullptr) {
      group->network()->close(kGoodbyePatience);
    }
    C10_THROW_ERROR(DistBackendError, text);
  }
  std::lock_guard<std::mutex> lock(open_channels().mutex);
  std::erase_if(open_channels().channels, [](const auto& known) { return known.expired(); });
  open_channels().channels.push_back(channels);
  return channels;
}

bool GroupRuntime::wait_until_idle(std::chrono::milliseconds limit) {
  return collectives_->wait_until_idle(limit) && messages_->wait_until_idle(limit);
}

void GroupRuntime::close(std::chrono::milliseconds patience) {
  close(patience, kGoodbyePatience, /*waits_for_callbacks=*/true);
}

void GroupRuntime::abort() {
  if (!is_closed_) {
    is_aborted_ = true;
  }
  close(kNow, kAbortGoodbyePatience, /*waits_for_callbacks=*/false);
  group_->let_go();
}

void GroupRuntime::close(std::chrono::milliseconds patience, std::chrono::milliseconds goodbye,
                         bool waits_for_callbacks) {
  if (!group_->is_own_process()) {
    return;
  }
  const GroupContext::Use use(*group_, /*must_succeed=*/false);  // before others find it closed: an abort then lets go
  if (is_closed_.exchange(true)) {
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  const auto time_left = [&] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  };
  if (!group_->has_failed()) {
    collectives_->wait_until_idle(time_left());
    messages_->wait_until_idle(std::min(time_left(), kListeningPatience));
    if (!messages_->is_only_listening() || has_waiting_threads()) messages_->wait_until_idle(time_left());
  }
  group_->depart();
  if (!wait_until_idle(kNow)) {
    engine_.wake();  // fails what is left
    collectives_->wait_until_idle(kFailPatience);
    messages_->wait_until_idle(kFailPatience);
  }
  engine_.remove(channels(), waits_for_callbacks);
  // What is left when the thread was busy for a long time with another group: nobody else fails it any more.
  collectives_->advance_on_engine_thread();
  messages_->advance_on_engine_thread();
  if (group_->network() != nullptr) {
    group_->network()->close(goodbye);
  }
  group_->retired_works().release();
}

std::vector<std::shared_ptr<GroupRuntime>> GroupRuntime::all_open() {
  std::vector<std::shared_ptr<GroupRuntime>> open;
  std::lock_guard<std::mutex> lock(open_channels().mutex);
  for (const auto& known : open_channels().channels) {
    const auto channels = known.lock();
    if (channels != nullptr && channels->group_->is_own_process() && !channels->is_closed()) {
      open.push_back(channels);
    }
  }
  return open;
}

bool GroupRuntime::are_all_idle() {
  const auto open = all_open();
  return std::all_of(open.begin(), open.end(), [](const auto& channels) { return channels->wait_until_idle(kNow); });
}

// Without the lock while it closes: a callback that is waited for may itself make or drop a group.
void GroupRuntime::close_all(std::chrono::milliseconds patience) {
  for (const auto& channels : all_open()) {
    channels->close(patience);
  }
}

}  // namespace zeropg

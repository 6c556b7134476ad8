// Other ranks in a group: a smaller group of those that are left, and the same group with new members.
#include <algorithm>
#include <random>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <variant>

#include "backend/engine/completed_work.h"
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::Backend;

namespace {

constexpr int kShrinkAbort = 1;  // torch.distributed's SHRINK_ABORT
#ifdef C10D_BACKEND_HAS_RECONFIGURE
constexpr std::chrono::milliseconds kReconfigurePatience{5'000};  // for what runs on the old group

// Sorts by the rank that the member had when it was made; members that took its place sort by chance.
std::string random_handle(int rank) {
  std::random_device random;
  char text[64];
  std::snprintf(text, sizeof(text), "zeropg:%08d:%08x%08x%08x%08x", rank, random(), random(), random(), random());
  return text;
}
#endif

}  // namespace

c10::intrusive_ptr<Backend> ProcessGroupZero::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                                     const c10::intrusive_ptr<Options>& opts) {
  const Call call = make_call("zeropg:shrink");
  const std::set<int64_t> excluded(ranks_to_exclude.begin(), ranks_to_exclude.end());
  std::string names;
  for (const int64_t rank : excluded) {
    names += (names.empty() ? "" : ",") + std::to_string(call.root(rank));
  }
  call.check_value(!excluded.empty(), "no rank is excluded; name at least one.");
  call.check_value(excluded.count(rank_) == 0, "this rank is one of those to exclude (", names,
                   "); only those that stay make the call.");
  const auto options = child_options(opts);
  options->global_ranks_in_group.clear();
  int own = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (excluded.count(rank) == 0) {
      own += rank < rank_ ? 1 : 0;
      const auto& known = options_->global_ranks_in_group;
      options->global_ranks_in_group.push_back(known.empty() ? static_cast<uint64_t>(rank)
                                                             : known.at(static_cast<size_t>(rank)));
    }
  }
  const std::string end =
      c10::str(prefix("zeropg:shrink"), ": the group was shrunk by ", names, "; use the group that shrink returned.");
  if ((flags & kShrinkAbort) != 0) {
    group().fail({.text = end});
    channels_->engine().wake();
  } else {
    waitForPendingWorks();
  }
  // Attempts are counted, because one that failed leaves keys behind. Those that stay have made the same calls.
  auto store = c10::make_intrusive<c10d::PrefixStore>(
      c10::str("zeropg-shrink/", names, "/", shrink_count_.fetch_add(1)), store_);
  auto child = make_child(store, own, static_cast<int>(options->global_ranks_in_group.size()), options);
  group().fail(
      {.text = end, .is_wanted = true});  // all have come, so nobody needs the old group for an operation any more
  channels_->engine().wake();
  return child;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10d::ReconfigureHandle ProcessGroupZero::get_reconfigure_handle() const {
  std::lock_guard<std::mutex> lock(membership_mutex_);
  if (handle_.empty()) {
    handle_ = random_handle(rank_);
  }
  return handle_;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZero::reconfigure(const c10d::ReconfigureOptions& opts) {
  const auto check = [&](bool condition, const auto&... text) {
    if (!condition) {
      C10_THROW_ERROR(ValueError, c10::str(prefix("zeropg:reconfigure"), ": ", text...));
    }
  };
  std::vector<std::string> members;
  if (const auto* ordered = std::get_if<std::vector<std::string>>(&opts.handles)) {
    members = *ordered;
  } else {
    const auto& unordered = std::get<std::unordered_set<std::string>>(opts.handles);
    members.assign(unordered.begin(), unordered.end());
    std::sort(members.begin(), members.end());
  }
  const auto own = std::find(members.begin(), members.end(), get_reconfigure_handle());
  check(own != members.end(), "this rank's handle is not among the ", members.size(),
        " given; hand in what get_reconfigure_handle() gave on each rank.");
  check(std::set<std::string>(members.begin(), members.end()).size() == members.size(),
        "a handle is given twice; give each rank's once.");
  check(uuids_.insert(opts.uuid).second, "the uuid ", opts.uuid, " was used before; give a new one each time.");
  if (const auto channels = current_channels()) {
    if (!channels->group().is_own_process()) {
      make_call("zeropg:reconfigure");  // refuses a forked child
    }
    channels->close(kReconfigurePatience);
  }
  {
    std::lock_guard<std::mutex> lock(inner_mutex_);
    if (cuda_backend_) {
      cuda_backend_->abort();
      cuda_backend_.reset();
    }
  }
  rank_ = static_cast<int>(own - members.begin());
  size_ = static_cast<int>(members.size());
  options_->global_ranks_in_group.clear();
  // The new members' NCCL must not meet keys of the old ones'.
  store_ = c10::make_intrusive<c10d::PrefixStore>(c10::str("zeropg-reconfigure/", opts.uuid), first_store_);
  join(opts.timeout.value_or(timeouts_.get()));
  return c10::make_intrusive<CompletedWork>(rank_);
}
#endif

}  // namespace zeropg

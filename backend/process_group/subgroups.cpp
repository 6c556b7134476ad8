// Groups that are made from a group, and what of c10d's is refused.
#include <algorithm>
#include <set>
#include <typeinfo>

#include "backend/process_group/c10d_window.h"
#include "backend/process_group/process_group.h"

namespace zeropg {

using c10d::Backend;
using c10d::Store;

c10::intrusive_ptr<Backend> ProcessGroupZero::make_child(const c10::intrusive_ptr<Store>& store, int rank, int size,
                                                         const c10::intrusive_ptr<BackendOptions>& options) {
  return c10::make_intrusive<ProcessGroupZero>(store, rank, size, options, cuda_factory());
}

c10::intrusive_ptr<BackendOptions> ProcessGroupZero::child_options(const c10::intrusive_ptr<Options>& given) const {
  const auto whole = c10::dynamic_intrusive_pointer_cast<BackendOptions>(given);
  auto options = c10::make_intrusive<BackendOptions>(whole ? *whole : *options_);
  options->known_links = known_links();
  if (whole) {
    return options;
  }
  options->timeout = timeouts_.get();
  if (given) {
    const Options& plain = *given;
    if (typeid(plain) != typeid(Options)) {
      C10_THROW_ERROR(TypeError,
                      c10::str(prefix("zeropg:split"), ": the options are those of the backend ", plain.backend,
                               ", expected a zeropg.BackendOptions or None for the parent's."));
    }
    options->timeout = plain.timeout;
    options->group_name = plain.group_name;
    options->group_desc = plain.group_desc;
  }
  return options;
}

c10::intrusive_ptr<Backend> ProcessGroupZero::split(const c10::intrusive_ptr<Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& opts) {
  const Call call = make_call("zeropg:split");
  call.check_value(!ranks.empty(), "the child has no ranks; name at least one.");
  call.check_value(std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size(),
                   "a rank is named twice; name each rank of the child once.");
  for (const int rank : ranks) {
    call.root(rank);
  }
  const auto options = child_options(opts);
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  std::lock_guard<std::mutex> lock(split_mutex_);
  // c10d asks once for each kind of device that the parent serves, on ranks outside the child and in torch 2.11 on all.
  if (!options->group_name.empty() && options->group_name == last_child_name_) {
    auto child = last_child_.lock();
    if (child || own == ranks.end()) {
      return child;
    }
  }
  split_count_.fetch_add(1);
  last_child_name_ = options->group_name;
  last_child_.reset();
  if (own == ranks.end()) {
    return nullptr;
  }
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto& known = options_->global_ranks_in_group;
    options->global_ranks_in_group.push_back(known.empty() ? static_cast<uint64_t>(rank)
                                                           : known.at(static_cast<size_t>(rank)));
  }
  auto child = make_child(store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), options);
  last_child_ = c10::weak_intrusive_ptr<Backend>(child);
  return child;
}

c10::intrusive_ptr<Backend> ProcessGroupZero::merge(const c10::intrusive_ptr<Store>& store,
                                                    const c10::intrusive_ptr<Options>& opts, const int& rank,
                                                    const int& size) {
  make_call("zeropg:merge");  // refuses a forked child
  const auto options = child_options(opts);
  options->global_ranks_in_group.clear();
  return make_child(store, rank, size, options);
}

namespace {

[[noreturn]] void refuse(const std::string& prefix, const char* text) {
  C10_THROW_ERROR(NotImplementedError, prefix + ": " + text);
}

}  // namespace

void ProcessGroupZero::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& /*hook*/) {
  refuse(prefix("zeropg:register_on_completion_hook"),
         "this hook is NCCL's own; use work.get_future().then(...), and zeropg.stats() for durations.");
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
void ProcessGroupZero::startTimeEstimate() {
  refuse(prefix("zeropg:start_time_estimate"), "times are not estimated; run the operations and read zeropg.stats().");
}
float ProcessGroupZero::endTimeEstimate() {
  refuse(prefix("zeropg:end_time_estimate"), "times are not estimated; run the operations and read zeropg.stats().");
}
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
c10::intrusive_ptr<c10d::Window> ProcessGroupZero::new_window(const std::optional<at::Tensor>& tensor) {
  make_call("zeropg:new_window");  // refuses a forked child
  auto window = c10::make_intrusive<C10dWindow>(c10::intrusive_ptr<ProcessGroupZero>::reclaim_copy(this));
  if (tensor.has_value()) {
    window->tensor_register(*tensor);
  }
  return window;
}
#endif

}  // namespace zeropg

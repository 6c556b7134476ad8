#include "backend/group/hooks.h"

#include <c10/util/Exception.h>

#include <utility>

namespace zeropg {

namespace {

template <typename Hook>
void set(std::map<int64_t, Hook>& hooks, int64_t id, Hook hook) {
  if (hook) {
    hooks[id] = std::move(hook);
  } else {
    hooks.erase(id);
  }
}

}  // namespace

void Hooks::set_completion(int64_t id, CompletionHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  set(completion_, id, std::move(hook));
  has_completion_ = !completion_.empty();
}

void Hooks::set_abort(int64_t id, AbortHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  set(abort_, id, std::move(hook));
}

void Hooks::notify_complete(uint64_t completion_key, float duration_ms) const {
  if (!has_completion_.load(std::memory_order_relaxed)) {
    return;
  }
  std::map<int64_t, CompletionHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks = completion_;
  }
  for (const auto& [id, hook] : hooks) {
    hook(completion_key, duration_ms);
  }
}

bool Hooks::has_abort() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !abort_.empty();
}

void Hooks::run_abort() const {
  std::map<int64_t, AbortHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks = abort_;
  }
  for (const auto& [id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception& error) {
      TORCH_WARN("[zeropg] an abort hook failed: ", error.what());
    }
  }
}

}  // namespace zeropg

// What others want to hear of a group: operations that complete, and its failure. Kept apart from the group, which a
// reconfiguration replaces.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace zeropg {

// Any thread. No hook runs under the lock of the table: hooks may add and remove hooks.
class Hooks {
 public:
  // Called when an operation has succeeded, on the thread that ran it, without locks; must not take the GIL.
  using CompletionHook = std::function<void(uint64_t completion_key, float duration_ms)>;
  using AbortHook = std::function<void()>;

  void set_completion(int64_t id, CompletionHook hook);  // a null hook removes it
  void set_abort(int64_t id, AbortHook hook);            // a null hook removes it

  void notify_complete(uint64_t completion_key, float duration_ms) const;
  bool has_abort() const;
  // On a thread that may block. An exception of a hook is a warning.
  void run_abort() const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, CompletionHook> completion_;  // guarded by mutex_
  std::map<int64_t, AbortHook> abort_;            // guarded by mutex_
  std::atomic<bool> has_completion_{false};
};

}  // namespace zeropg

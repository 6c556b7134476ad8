// How long the operations of one process group may take.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace zeropg {

// More time for the operations that begin after it was given, until the first of them ends (c10d's "ephemeral"
// timeouts).
struct TimeoutExtension {
  std::chrono::milliseconds extra;
  std::atomic<bool> is_over{false};
};

// What one operation got.
struct OperationTimeout {
  std::chrono::milliseconds timeout{};
  std::vector<std::shared_ptr<TimeoutExtension>> extensions{};  // life shared with the group's Timeouts

  // When the operation ends.
  void end_extensions() const {
    for (const auto& extension : extensions) {
      extension->is_over = true;
    }
  }
};

// The longest timeout: more milliseconds, counted in nanoseconds from now, would wrap around.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365 * 100);
constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return timeout < kLongestTimeout ? timeout : kLongestTimeout;
}

// Any thread.
class Timeouts {
 public:
  explicit Timeouts(std::chrono::milliseconds timeout) : timeout_ms_(bounded(timeout).count()) {}

  void set(std::chrono::milliseconds timeout) { timeout_ms_ = bounded(timeout).count(); }
  std::chrono::milliseconds get() const { return std::chrono::milliseconds(timeout_ms_.load()); }
  void extend(std::chrono::milliseconds extra);
  // `asked` of an operation's own options; 0 or less is the group's.
  OperationTimeout next(std::chrono::milliseconds asked);

 private:
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> has_extensions_{false};
  std::mutex mutex_;
  std::vector<std::shared_ptr<TimeoutExtension>> extensions_;  // guarded by mutex_
};

}  // namespace zeropg

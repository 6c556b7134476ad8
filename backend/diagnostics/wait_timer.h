// How long a rank had to wait for another one: from the look at which nothing moved to the one at which something did.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace zeropg {

class WaitTimer {
 public:
  using Clock = std::chrono::steady_clock;

  // After each look: whether there is anything to wait for, and whether any of it moved.
  void look(bool is_wanted, bool has_moved) {
    if (since_ && (has_moved || !is_wanted)) {
      end();
    }
    if (!since_ && is_wanted && !has_moved) {
      since_ = Clock::now();
    }
  }

  // For a message that has moved whole: the seconds since the last one, as far as it was posted by then.
  double take(Clock::time_point posted) {
    if (since_) {
      end();
    }
    if (waited_ == Clock::duration::zero()) {
      return 0;
    }
    const Clock::duration own = std::min(std::exchange(waited_, Clock::duration::zero()), Clock::now() - posted);
    return std::chrono::duration<double>(own).count();
  }

 private:
  void end() {
    waited_ += Clock::now() - *since_;
    since_.reset();
  }

  std::optional<Clock::time_point> since_;
  Clock::duration waited_{};
};

}  // namespace zeropg

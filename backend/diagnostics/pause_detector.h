// Deadlines on a machine that stood still.
#pragma once

#include <algorithm>
#include <chrono>

namespace zeropg {

// A virtual machine may get no CPU for seconds, and then all deadlines have passed before anybody had the time to keep
// one. Who looks at deadlines at short intervals knows it from its own absence, and gives its peers, who were away as
// well, some time to come. A rank that alone was away hears meanwhile what the others have to say of it.
class PauseDetector {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Called at every look at an operation that began at `start` and has not ended. Whether its deadline, if it has
  // passed, counts.
  bool may_blame(TimePoint now, TimePoint start) {
    if (now - std::max(last_look_, start) > kAbsence) {
      patience_ends_ = now + kPatience;
    }
    last_look_ = now;
    return now >= patience_ends_;
  }

 private:
  static constexpr std::chrono::milliseconds kAbsence{1'000};  // looks are some 50 ms apart
  static constexpr std::chrono::milliseconds kPatience{2'000};

  TimePoint last_look_{};
  TimePoint patience_ends_{};
};

}  // namespace zeropg

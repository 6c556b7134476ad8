// What a sharded model did when, for `python -m zeropg trace`. Off, it costs a branch per event.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zeropg {

// Not thread-safe: used by the thread that trains, like all of sharding/. Times are nanoseconds of the steady clock.
class EventLog {
 public:
  // A wait is what other ranks and the network cost this one; the rest is what it did, or had going on behind that.
  enum class Kind : uint8_t { kForward, kBackward, kGather, kReduce, kStep, kWaitForGather, kWaitForReduce, kWait };
  struct Event {
    Kind kind;
    std::string unit;  // empty: the root's, or none
    int64_t begin;
    int64_t end;
    int64_t bytes;  // that it moved, as this rank's tensors have them
  };
  struct Sample {
    int64_t time;
    std::map<std::string, int64_t> bytes;  // that are held, by class
  };
  static constexpr size_t kMostEvents = 1'000'000;  // a log that nobody takes ends there

  void start() { is_on_ = true; }
  void stop() { is_on_ = false; }
  bool is_on() const { return is_on_; }

  int64_t now() const { return is_on_ ? clock() : 0; }
  // `begin`: what now() said; 0: nothing is noted.
  void add(Kind kind, const std::string& unit, int64_t begin, int64_t bytes = 0) {
    if (is_on_ && begin != 0 && events_.size() < kMostEvents) {
      events_.push_back({kind, unit, begin, clock(), bytes});
    }
  }
  // Around an optimizer's step, also while the log is off.
  void begin_step() { step_began_ = now(); }
  void end_step() {
    ++steps_;
    add(Kind::kStep, "", step_began_);
  }
  int64_t steps() const { return steps_; }  // that have ended
  template <typename Report>
  void sample(Report&& report) {
    if (is_on_ && samples_.size() < kMostEvents) {
      samples_.push_back({clock(), report()});
    }
  }
  std::vector<Event> take_events() { return std::exchange(events_, {}); }
  std::vector<Sample> take_samples() { return std::exchange(samples_, {}); }

 private:
  static int64_t clock() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  bool is_on_ = false;
  int64_t steps_ = 0;
  int64_t step_began_ = 0;
  std::vector<Event> events_;
  std::vector<Sample> samples_;
};

}  // namespace zeropg

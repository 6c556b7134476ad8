// The order in which this rank made units whole, for comparing it between ranks: a hash of all of them, and the last
// few for a message, so that a program that never compares (it only evaluates) does not grow.
#pragma once

#include <cstdint>
#include <deque>

namespace zeropg {

class UnitOrder {
 public:
  void add(int64_t unit) {
    fingerprint_ = (fingerprint_ ^ static_cast<uint64_t>(unit + 1)) * 1099511628211ULL;
    last_.push_back(unit);
    if (last_.size() > kNamed) {
      last_.pop_front();
      is_cut_ = true;
    }
  }
  uint64_t fingerprint() const { return fingerprint_; }
  const std::deque<int64_t>& last() const { return last_; }
  bool is_cut() const { return is_cut_; }  // `last` lacks the first ones

 private:
  static constexpr size_t kNamed = 200;
  uint64_t fingerprint_ = 14695981039346656037ULL;  // FNV-1a
  std::deque<int64_t> last_;
  bool is_cut_ = false;
};

}  // namespace zeropg

// Which unit a program makes whole next, judged by what it did before: after each two units that followed one another,
// the unit that last came third. So a step that takes another path changes only what is expected where it differed.
//
// Ranks that gather ahead must expect the same. So only what all ranks have done alike is learned, and where they are
// found to differ nothing is.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

namespace zeropg {

class UnitForecast {
 public:
  static constexpr int64_t kNone = -1;  // no unit: the pass begins or ends here, or nothing is known

  // Where in a pass (a forward with its backward) the program is: the last two units, or kNone.
  struct Place {
    int64_t before = kNone;
    int64_t unit = kNone;
    Place then(int64_t next) const { return {unit, next}; }
    bool operator<(const Place& other) const { return std::pair(before, unit) < std::pair(other.before, other.unit); }
  };

  void add(int64_t unit) {  // it is made whole now
    fresh_[place_] = unit;
    place_ = place_.then(unit);
  }
  // The pass is over. Returns whether there was one.
  bool end() {
    if (place_.unit == kNone) {
      return false;
    }
    fresh_[place_] = kNone;
    place_ = {};
    return true;
  }

  void learn() {  // what was added since the last learn() or forget(): every rank has added the same
    for (const auto& [place, unit] : fresh_) {
      known_[place] = unit;
    }
    fresh_.clear();
  }
  void forget() { fresh_.clear(); }

  const Place& place() const { return place_; }
  int64_t next() const { return next(place_); }
  int64_t next(const Place& place) const {
    const auto found = known_.find(place);
    return found == known_.end() ? kNone : found->second;
  }

 private:
  Place place_;
  std::map<Place, int64_t> known_;
  std::map<Place, int64_t> fresh_;
};

}  // namespace zeropg

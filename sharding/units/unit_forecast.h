// Which unit a program makes whole next, judged by what it did before: after each two units that followed one another,
// the unit that last came third. So a step that takes another path changes only what is expected where it differed.
//
// Pure: ranks that add the same and end where the others end expect the same.
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
    known_[place_] = unit;
    place_ = place_.then(unit);
  }
  void end() {  // the pass is over
    if (place_.unit != kNone) {
      known_[place_] = kNone;
      place_ = {};
    }
  }
  void forget() { *this = UnitForecast(); }

  const Place& place() const { return place_; }
  int64_t next(const Place& place) const {
    const auto found = known_.find(place);
    return found == known_.end() ? kNone : found->second;
  }

 private:
  Place place_;
  std::map<Place, int64_t> known_;
};

}  // namespace zeropg

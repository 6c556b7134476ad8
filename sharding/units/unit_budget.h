// Which units stay whole beyond what runs, and which may be gathered ahead, within limits on their elements.
//
// Pure: it knows the limits, the sizes and the order in which a program needs units, and not which units are whole at
// the moment, which in a backward may depend on a rank's gradients. Ranks that tell it the same decide the same.
#pragma once

#include <cstdint>
#include <vector>

#include "sharding/parameters/unit_limits.h"

namespace zeropg {

class UnitBudget {
 public:
  using Units = std::vector<int64_t>;  // by their numbers

  UnitBudget() = default;
  UnitBudget(const std::vector<int64_t>& numels, const UnitLimits& limits);  // of all units, the root last

  void begin_forward(int64_t unit);
  void end_forward(int64_t unit) { units_[unit].is_in_forward = false; }

  // It is needed now; so it is neither kept nor ahead any more. Returns the kept units that give way.
  [[nodiscard]] Units need(int64_t unit);
  bool may_gather_ahead(int64_t unit) const;
  [[nodiscard]] Units gather_ahead(int64_t unit);  // as need() returns
  void drop_ahead();
  // Its forward is over, and a backward may follow. Returns the units that do not stay whole for it, perhaps itself.
  [[nodiscard]] Units keep(int64_t unit);
  void forget_kept(int64_t unit);
  [[nodiscard]] Units drop_kept();

  bool is_ahead(int64_t unit) const { return units_[unit].is_ahead; }
  bool is_kept(int64_t unit) const;
  bool persists(int64_t unit) const { return units_[unit].persists; }

 private:
  static constexpr int64_t kNone = -1;

  struct Entry {
    int64_t numel = 0;
    bool persists = false;
    bool is_in_forward = false;
    bool is_ahead = false;
  };

  bool is_in_use(size_t unit) const;
  int64_t numel_in_use() const;
  int64_t numel_ahead() const;
  int64_t numel_kept() const;
  int64_t room_for_kept() const;
  Units give_way();

  UnitLimits limits_;
  std::vector<Entry> units_;
  int64_t needed_ = kNone;  // the last one, while its forward or backward may run
  Units kept_;              // the one whose forward ended first comes first
};

}  // namespace zeropg

#include "sharding/units/unit_budget.h"

#include <algorithm>
#include <utility>

namespace zeropg {

UnitBudget::UnitBudget(const std::vector<int64_t>& numels, const UnitLimits& limits) : limits_(limits) {
  for (const int64_t numel : numels) {
    units_.push_back({.numel = numel});
  }
  for (Entry& unit : units_) {
    unit.persists = unit.numel > 0 && unit.numel <= limits_.persistent_numel;
    unit.persists = unit.persists && numel_in_use() <= limits_.max_whole_numel;
  }
}

// The root is whole while any other unit runs. What persists is taken for whole before it is first needed, too.
bool UnitBudget::is_in_use(size_t unit) const {
  return unit + 1 == units_.size() || std::cmp_equal(unit, needed_) || units_[unit].is_in_forward ||
         units_[unit].persists;
}

int64_t UnitBudget::numel_in_use() const {
  int64_t numel = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    numel += is_in_use(unit) ? units_[unit].numel : 0;
  }
  return numel;
}

int64_t UnitBudget::numel_ahead() const {
  int64_t numel = 0;
  for (const Entry& unit : units_) {
    numel += unit.is_ahead ? unit.numel : 0;
  }
  return numel;
}

int64_t UnitBudget::numel_kept() const {
  int64_t numel = 0;
  for (const int64_t unit : kept_) {
    numel += units_[unit].numel;
  }
  return numel;
}

bool UnitBudget::is_kept(int64_t unit) const { return std::ranges::find(kept_, unit) != kept_.end(); }

void UnitBudget::begin_forward(int64_t unit) {
  if (std::cmp_equal(unit + 1, units_.size())) {  // what one that raised has left
    for (Entry& other : units_) {
      other.is_in_forward = false;
    }
  }
  units_[unit].is_in_forward = true;
}

UnitBudget::Units UnitBudget::need(int64_t unit) {
  forget_kept(unit);
  units_[unit].is_ahead = false;
  needed_ = unit;
  return give_way();
}

// What is kept saves a gather later, what comes next a wait now: so it gives way.
bool UnitBudget::may_gather_ahead(int64_t unit) const {
  const int64_t ahead = numel_ahead();
  const int64_t numel = units_[unit].numel;
  const bool is_within = ahead == 0 ? limits_.prefetch_numel > 0 : ahead <= limits_.prefetch_numel - numel;
  return is_within && numel_in_use() + ahead <= limits_.max_whole_numel - numel;
}

UnitBudget::Units UnitBudget::gather_ahead(int64_t unit) {
  units_[unit].is_ahead = true;
  return give_way();
}

void UnitBudget::drop_ahead() {
  for (Entry& unit : units_) {
    unit.is_ahead = false;
  }
}

UnitBudget::Units UnitBudget::keep(int64_t unit) {
  needed_ = needed_ == unit ? kNone : needed_;
  forget_kept(unit);
  if (units_[unit].numel == 0 || units_[unit].numel > room_for_kept()) {  // it would go after all the others
    return {unit};
  }
  kept_.push_back(unit);
  return give_way();
}

void UnitBudget::forget_kept(int64_t unit) { std::erase(kept_, unit); }

UnitBudget::Units UnitBudget::drop_kept() {
  needed_ = kNone;
  return std::exchange(kept_, {});
}

int64_t UnitBudget::room_for_kept() const {
  return std::min(limits_.keep_numel, limits_.max_whole_numel - numel_in_use() - numel_ahead());
}

UnitBudget::Units UnitBudget::give_way() {
  int64_t kept = numel_kept();
  const int64_t room = room_for_kept();
  const auto first_that_stays = std::ranges::find_if(kept_, [&](int64_t unit) {
    const bool stays = kept <= room;
    kept -= stays ? 0 : units_[unit].numel;
    return stays;
  });
  Units gone(kept_.begin(), first_that_stays);
  kept_.erase(kept_.begin(), first_that_stays);
  return gone;
}

}  // namespace zeropg

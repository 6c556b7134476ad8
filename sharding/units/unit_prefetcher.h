// Gathers units before they are needed and keeps some whole until they are needed again, as forecast and budget say:
// Note [Gathering ahead] in unit_prefetcher.cpp.
#pragma once

#include <cstdint>
#include <functional>

#include "sharding/fetch/fetch.h"
#include "sharding/parameters/unit_limits.h"
#include "sharding/units/unit.h"
#include "sharding/units/unit_budget.h"
#include "sharding/units/unit_forecast.h"
#include "sharding/units/units.h"

namespace zeropg {

class UnitPrefetcher {
 public:
  // `make_sharded`: for units that give way to others.
  UnitPrefetcher(Units& units, const UnitLimits& limits, Fetch& fetch, std::function<void(Unit&)> make_sharded);

  // Around the forward of a unit that is whole, in any pass.
  void begin_forward(const Unit& unit) { budget_.begin_forward(units_.index_of(unit)); }
  void end_forward(const Unit& unit) { budget_.end_forward(units_.index_of(unit)); }

  // The unit is made whole next, for `use`. Nothing happens for one that persists. Otherwise, where it is not the unit
  // that was expected next to compute, what was gathered ahead is dropped; and to compute, its gather begins, if it has
  // not, and those of what comes after it. For other uses the caller gathers.
  void need(Unit& unit, Fetch::Use use);
  // The unit is needed again, and still whole.
  void need_again(const Unit& unit);
  // Its forward is over, and a backward may follow: the unit, or others, may stay whole for it.
  void keep(const Unit& unit);
  // The unit is not whole any more.
  void forget_kept(const Unit& unit) { budget_.forget_kept(units_.index_of(unit)); }
  // Whether the unit is small, and resharded only with all of them.
  bool persists(const Unit& unit) const { return budget_.persists(units_.index_of(unit)); }

  // The pass is over, and nothing is expected beyond: drops what was gathered ahead. Returns what was kept.
  [[nodiscard]] UnitBudget::Units end_pass();
  // The pass was interrupted, perhaps on this rank alone: what is on its way is left alone, and what was learned
  // forgotten.
  void forget_passes();

 private:
  void prefetch(const Unit& unit);
  void prefetch_ahead();
  void drop_prefetched(bool waits);
  void give_way(const UnitBudget::Units& given_up);

  Units& units_;
  Fetch& fetch_;
  std::function<void(Unit&)> make_sharded_;
  UnitForecast forecast_;
  UnitBudget budget_;
};

}  // namespace zeropg

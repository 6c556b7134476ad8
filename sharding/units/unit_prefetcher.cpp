#include "sharding/units/unit_prefetcher.h"

#include <utility>
#include <vector>

namespace zeropg {
namespace {

std::vector<int64_t> numels_of(Units& units) {
  std::vector<int64_t> numels;
  for (const Unit& unit : units.all()) {
    numels.push_back(unit.numel);
  }
  return numels;
}

}  // namespace

UnitPrefetcher::UnitPrefetcher(Units& units, const UnitLimits& limits, Fetch& fetch,
                               std::function<void(Unit&)> make_sharded)
    : units_(units), fetch_(fetch), make_sharded_(std::move(make_sharded)), budget_(numels_of(units), limits) {}

// Note [Gathering ahead]
// Every rank must issue the same gathers in the same order. So what is gathered ahead, and what stays whole where it
// need not be gathered again, is a function of which units were needed, of where forwards ended and of where passes
// did: never of time, memory, gradients or which units are still whole. And every gather says which one it is
// (GatheredFetch): where ranks issue different ones, after all, it is an error, and no unit gets the values of another.
void UnitPrefetcher::need(Unit& unit, Fetch::Use use) {
  const int64_t index = units_.index_of(unit);
  const bool was_expected = use == Fetch::Use::kCompute && budget_.is_ahead(index);
  if (budget_.persists(index)) {  // small, and gathered once between updates: nothing is to be learned of it
    return;
  }
  if (!was_expected) {
    drop_prefetched(/*waits=*/true);
  }
  if (use != Fetch::Use::kCompute) {
    return;
  }
  forecast_.add(index);
  give_way(budget_.need(index));
  if (!was_expected) {
    prefetch(unit);
  }
  prefetch_ahead();
}

void UnitPrefetcher::need_again(const Unit& unit) {
  const int64_t index = units_.index_of(unit);
  if (!budget_.is_kept(index)) {
    return;
  }
  if (budget_.is_ahead(index)) {  // it ran twice in a row: it is here, and would be once more
    drop_prefetched(/*waits=*/true);
  }
  give_way(budget_.need(index));
  prefetch_ahead();  // what had to wait for its turn in memory
}

void UnitPrefetcher::prefetch_ahead() {
  UnitForecast::Place place = forecast_.place();
  for (size_t steps = 0; steps < units_.all().size(); ++steps) {
    const int64_t next = forecast_.next(place);
    if (next == UnitForecast::kNone) {
      return;
    }
    place = place.then(next);
    if (budget_.is_ahead(next)) {
      continue;
    }
    if (budget_.is_kept(next) || !budget_.may_gather_ahead(next)) {  // one that is kept gives way before its turn
      return;
    }
    give_way(budget_.gather_ahead(next));
    prefetch(units_[next]);
  }
}

void UnitPrefetcher::prefetch(const Unit& unit) {
  for (FlatParameter* flat : unit.flats) {
    fetch_.prefetch(*flat);
  }
}

void UnitPrefetcher::drop_prefetched(bool waits) {
  fetch_.drop_prefetched(waits);
  budget_.drop_ahead();
}

void UnitPrefetcher::keep(const Unit& unit) { give_way(budget_.keep(units_.index_of(unit))); }

UnitBudget::Units UnitPrefetcher::end_pass() {
  forecast_.end();
  drop_prefetched(/*waits=*/true);
  return budget_.drop_kept();
}

void UnitPrefetcher::forget_passes() {
  forecast_.forget();
  drop_prefetched(/*waits=*/false);
}

void UnitPrefetcher::give_way(const UnitBudget::Units& given_up) {
  for (const int64_t index : given_up) {
    make_sharded_(units_[index]);
  }
}

}  // namespace zeropg

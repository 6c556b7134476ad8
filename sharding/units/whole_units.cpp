#include "sharding/units/whole_units.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "sharding/fetch/registry.h"

namespace zeropg {
namespace {

bool is_attached(const Unit& unit) {
  return std::all_of(unit.flats.begin(), unit.flats.end(),
                     [](const FlatParameter* flat) { return flat->is_attached(); });
}

// The memory of units belongs to no transform (torch.func.grad) and no graph that runs when they are made whole.
struct OutsideTransforms {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_transform{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace

WholeUnits::WholeUnits(Communicator& communicator, const ShardingOptions& options, Units& units,
                       std::function<WriteLedger::Answer()> answer)
    : communicator_(communicator),
      options_(options),
      units_(units),
      fetch_(make_fetch(communicator, options, units.flat_pointers())),
      ledger_(communicator, std::move(answer)),
      prefetcher_(units, options.limits, *fetch_, [this](Unit& unit) { make_sharded(unit); }) {}

void WholeUnits::unshard(Unit& unit, Fetch::Use use) {
  const OutsideTransforms outside;
  if (unit.is_whole) {
    prefetcher_.need_again(unit);
    return;
  }
  TORCH_CHECK(!is_updating_, communicator_.context("forward"),
              "called while masters are written (zeropg.writable_shards); call it after the `with`.");
  try {
    if (gathers()) {
      prefetcher_.need(unit, use);
    }
    for (FlatParameter* flat : unit.flats) {
      fetch_->unshard(*flat, use);
      ledger_.show_own_writes(*flat);
    }
  } catch (...) {
    drop(unit);
    throw;
  }
  unit.is_whole = true;
}

void WholeUnits::end_pass() {
  const UnitBudget::Units kept = prefetcher_.end_pass();
  if (!keeps_whole_) {
    for (const int64_t index : kept) {
      make_sharded(units_[index]);
    }
  }
}

void WholeUnits::reshard_or_keep(Unit& unit) {
  if (!gathers() || prefetcher_.persists(unit)) {
    reshard(unit);
    return;
  }
  prefetcher_.keep(unit);
}

void WholeUnits::reshard(Unit& unit) {
  if (!fetch_->is_collective() || !prefetcher_.persists(unit)) {
    make_sharded(unit);
  }
}

void WholeUnits::make_sharded(Unit& unit) {
  if (unit.running == 0) {
    drop(unit);
  }
}

void WholeUnits::drop(Unit& unit) {
  if (full_depth_ > 0 || !options_.stage.shards_parameters) {
    return;
  }
  const OutsideTransforms outside;
  prefetcher_.forget_kept(unit);
  for (FlatParameter* flat : unit.flats) {
    if (flat->is_attached()) {
      ledger_.keep_own_writes(*flat);
      fetch_->reshard(*flat);
    }
  }
  unit.is_whole = false;
}

void WholeUnits::reshard_all() {
  keeps_whole_ = false;
  end_pass();
  for (Unit& unit : units_.all()) {
    drop(unit);
  }
}

void WholeUnits::end_update(Fetch::Change change) {
  has_overlapped_ |= change == Fetch::Change::kOverlappedStep && !options_.stage.shards_parameters;
  try {
    fetch_->end_update(units_.forward_order(), change);
  } catch (...) {
    note_arriving();
    throw;
  }
  note_arriving();
}

void WholeUnits::note_arriving() {
  for (Unit& unit : units_.all()) {
    unit.is_whole = unit.is_whole && is_attached(unit);
  }
}

void WholeUnits::join() {
  if (options_.stage.shards_parameters) {
    return;
  }
  for (Unit& unit : units_.all()) {
    if (!unit.is_whole && !is_attached(unit)) {
      unshard(unit);
    }
  }
}

void WholeUnits::begin_full(bool writable) {
  if (full_depth_ == 0) {
    reshard_all();
    try {
      for (Unit& unit : units_.all()) {
        unshard(unit, writable ? Fetch::Use::kWrite : Fetch::Use::kRead);
      }
    } catch (...) {
      reshard_all();
      throw;
    }
    is_full_writable_ = writable;
  }
  ++full_depth_;
}

void WholeUnits::end_full() {
  if (--full_depth_ == 0) {
    reshard_all();
  }
}

}  // namespace zeropg

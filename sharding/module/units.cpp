#include "sharding/module/units.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>
#include <malloc.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <tuple>

#include "sharding/fetch/registry.h"

namespace zeropg {
namespace {

constexpr int64_t kLargeNumel = 1 << 18;

int64_t numel_of(const Unit& unit) {
  return std::accumulate(unit.flats.begin(), unit.flats.end(), int64_t{0},
                         [](int64_t sum, const FlatParameter* flat) { return sum + flat->layout().total_numel; });
}

// Without padding, so that they are the same on any number of ranks.
std::vector<int64_t> numels_of(const ModelSource& source) {
  std::vector<int64_t> numels;
  for (const UnitSource& unit : source.units) {
    int64_t& numel = numels.emplace_back(0);
    for (const FlatParameter::Source& parameter : unit.parameters) {
      numel += c10::multiply_integers(parameter.sizes);
    }
  }
  return numels;
}

bool is_attached(const Unit& unit) {
  return std::all_of(unit.flats.begin(), unit.flats.end(),
                     [](const FlatParameter* flat) { return flat->is_attached(); });
}

// The parameters of a unit by (dtype, trainable or frozen, encoded or not), each group in the given order.
std::vector<std::vector<FlatParameter::Source>> group_sources(const std::vector<FlatParameter::Source>& sources) {
  std::vector<std::vector<FlatParameter::Source>> groups;
  std::map<std::tuple<c10::ScalarType, bool, bool>, size_t> index;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto key = std::make_tuple(sources[i].dtype, sources[i].requires_grad, sources[i].is_encoded);
    const auto [entry, is_new] = index.try_emplace(key, groups.size());
    if (is_new) {
      groups.emplace_back();
    }
    groups[entry->second].push_back(sources[i]);
    groups[entry->second].back().index = static_cast<int64_t>(i);
  }
  return groups;
}

}  // namespace

Units::Units(Communicator& communicator, const ShardingOptions& options, const ModelSource& source)
    : communicator_(communicator), options_(options), budget_(numels_of(source), options.limits) {
  for (const UnitSource& of_unit : source.units) {
    Unit unit;
    unit.name = of_unit.name;
    unit.is_root = &of_unit == &source.units.back();
    for (auto& group : group_sources(of_unit.parameters)) {
      flats_.push_back(std::make_unique<FlatParameter>(of_unit.name, std::move(group), options_, source.device,
                                                       communicator.shard(), communicator.shards()));
      FlatParameter* flat = flats_.back().get();
      unit.flats.push_back(flat);
      unit_of_[flat] = static_cast<int64_t>(units_.size());
    }
    units_.push_back(std::move(unit));
  }
}

std::vector<at::Tensor> Units::take_together(const ModelSource& source, int64_t index) {
  std::vector<at::Tensor> parameters;
  std::exception_ptr failure;
  try {
    parameters = source.take(index);
  } catch (...) {
    failure = std::current_exception();
  }
  if (communicator_.world_size() > 1 && !units_[index].flats.empty()) {  // before anybody waits for the values
    const at::Tensor failed =
        communicator_.gather_values({failure == nullptr ? 0 : 1}, units_[index].flats.front()->device());
    TORCH_CHECK(failure != nullptr || failed.sum().item<int64_t>() == 0, communicator_.context("fully_shard"), "rank ",
                failed.argmax().item<int64_t>(), " could not make the parameters of unit '", units_[index].name,
                "' and says why; the model is sharded in part now: build it again.");
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  return parameters;
}

void Units::adopt(const ModelSource& source, std::function<WriteLedger::Answer()> answer) {
  fetch_ = make_fetch(communicator_, options_, flat_pointers());
  ledger_ = std::make_unique<WriteLedger>(communicator_, std::move(answer));
  for (const int64_t index : source.order) {
    const std::vector<at::Tensor> parameters = take_together(source, index);
    for (FlatParameter* flat : units_.at(index).flats) {
      flat->take_over(parameters);
      ledger_->watch(*flat);
      if (communicator_.world_size() > 1) {
        communicator_.wait(communicator_.broadcast(flat->initial_values(), /*root=*/0));
      }
      fetch_->adopt(*flat);
    }
    // glibc keeps what was freed between what stays: without this a rank would hold twice what its shards take.
    if (numel_of(units_[index]) >= kLargeNumel) {
      malloc_trim(0);
    }
  }
  fetch_->end_adoption();
}

std::vector<FlatParameter*> Units::flat_pointers() const {
  std::vector<FlatParameter*> all;
  for (const auto& flat : flats_) {
    all.push_back(flat.get());
  }
  return all;
}

std::vector<FlatParameter*> Units::forward_order() const {
  std::vector<FlatParameter*> order = units_.back().flats;
  std::for_each(units_.begin(), units_.end() - 1,
                [&](const Unit& unit) { order.insert(order.end(), unit.flats.begin(), unit.flats.end()); });
  return order;
}

// Backward runs the units from last to first; the root, which holds the embedding, is done at the very end.
std::vector<FlatParameter*> Units::backward_order() const {
  std::vector<FlatParameter*> order;
  const auto append = [&](const Unit& unit) {
    std::copy_if(unit.flats.begin(), unit.flats.end(), std::back_inserter(order),
                 [](const FlatParameter* flat) { return c10::isFloatingType(flat->dtype()); });
  };
  std::for_each(units_.rbegin() + 1, units_.rend(), append);
  append(units_.back());
  return order;
}

void Units::unshard(Unit& unit, Fetch::Use use) {
  if (unit.is_whole) {
    if (budget_.is_kept(index_of(unit))) {
      take_kept(unit);
    }
    return;
  }
  TORCH_CHECK(!is_updating_, communicator_.context("forward"),
              "called while masters are written (zeropg.writable_shards); call it after the `with`.");
  at::NoGradGuard no_grad;
  try {
    if (gathers()) {
      gather(unit, use);
    }
    for (FlatParameter* flat : unit.flats) {
      fetch_->unshard(*flat, use);
      ledger_->show_own_writes(*flat);
    }
  } catch (...) {
    make_sharded(unit);
    throw;
  }
  unit.is_whole = true;
}

// Note [Gathering ahead]
// Every rank must issue the same gathers in the same order. So what is gathered ahead, and what stays whole where it
// need not be gathered again, is a function of which units were needed, of where forwards ended and of where passes
// did: never of time, memory, gradients or which units are still whole. And every gather says which one it is
// (GatheredFetch): where ranks issue different ones, after all, it is an error, and no unit gets the values of another.
void Units::gather(Unit& unit, Fetch::Use use) {
  const int64_t index = index_of(unit);
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
  make_sharded(budget_.need(index));
  if (!was_expected) {
    prefetch(unit);
  }
  prefetch_ahead();
}

void Units::take_kept(Unit& unit) {
  at::NoGradGuard no_grad;
  if (budget_.is_ahead(index_of(unit))) {  // it ran twice in a row: it is here, and would be once more
    drop_prefetched(/*waits=*/true);
  }
  make_sharded(budget_.need(index_of(unit)));
  prefetch_ahead();  // what had to wait for its turn in memory
}

void Units::prefetch_ahead() {
  UnitForecast::Place place = forecast_.place();
  for (size_t steps = 0; steps < units_.size(); ++steps) {
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
    make_sharded(budget_.gather_ahead(next));
    prefetch(units_[next]);
  }
}

void Units::prefetch(Unit& unit) {
  for (FlatParameter* flat : unit.flats) {
    fetch_->prefetch(*flat);
  }
}

void Units::drop_prefetched(bool waits) {
  fetch_->drop_prefetched(waits);
  budget_.drop_ahead();
}

void Units::end_pass() {
  forecast_.end();
  drop_prefetched(/*waits=*/true);
  const UnitBudget::Units kept = budget_.drop_kept();
  if (!keeps_whole_) {
    make_sharded(kept);
  }
}

void Units::forget_passes() {
  forecast_.forget();
  drop_prefetched(/*waits=*/false);
}

void Units::reshard_or_keep(Unit& unit) {
  if (!gathers() || budget_.persists(index_of(unit))) {
    reshard(unit);
    return;
  }
  make_sharded(budget_.keep(index_of(unit)));
}

void Units::reshard(Unit& unit) {
  if (!fetch_->is_collective() || !budget_.persists(index_of(unit))) {
    make_sharded(unit);
  }
}

void Units::make_sharded(const UnitBudget::Units& given_up) {
  for (const int64_t index : given_up) {
    make_sharded(units_[index]);
  }
}

void Units::make_sharded(Unit& unit) {
  if (full_depth_ > 0 || !options_.stage.shards_parameters) {
    return;
  }
  at::NoGradGuard no_grad;
  budget_.forget_kept(index_of(unit));
  for (FlatParameter* flat : unit.flats) {
    if (flat->is_attached()) {
      ledger_->keep_own_writes(*flat);
      fetch_->reshard(*flat);
    }
  }
  unit.is_whole = false;
}

void Units::reshard_all() {
  keeps_whole_ = false;
  end_pass();
  for (Unit& unit : units_) {
    make_sharded(unit);
  }
}

void Units::end_update(Fetch::Change change) {
  try {
    fetch_->end_update(forward_order(), change);
  } catch (...) {
    note_arriving();
    throw;
  }
  note_arriving();
}

void Units::note_arriving() {
  for (Unit& unit : units_) {
    unit.is_whole = unit.is_whole && is_attached(unit);
  }
}

void Units::join() {
  if (options_.stage.shards_parameters) {
    return;
  }
  for (Unit& unit : units_) {
    if (!unit.is_whole && !is_attached(unit)) {
      unshard(unit);
    }
  }
}

void Units::begin_full(bool writable) {
  if (full_depth_ == 0) {
    reshard_all();
    try {
      for (Unit& unit : units_) {
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

void Units::end_full() {
  if (--full_depth_ == 0) {
    reshard_all();
  }
}

}  // namespace zeropg

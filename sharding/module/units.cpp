#include "sharding/module/units.h"

#include <ATen/core/grad_mode.h>
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
    : communicator_(communicator), options_(options) {
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
    return;
  }
  TORCH_CHECK(!is_updating_, communicator_.context("forward"),
              "called while masters are written (zeropg.writable_shards); call it after the `with`.");
  at::NoGradGuard no_grad;
  try {
    if (fetch_->is_collective() && full_depth_ == 0) {
      gather(unit, use);
    }
    for (FlatParameter* flat : unit.flats) {
      fetch_->unshard(*flat, use);
      ledger_->show_own_writes(*flat);
    }
  } catch (...) {
    reshard(unit);
    throw;
  }
  unit.is_whole = true;
}

// Note [Gathering ahead]
// Every rank must issue the same gathers in the same order. So what is gathered ahead is a function of which units were
// gathered because they were needed, and of where passes ended: never of time, memory, gradients, the grad mode or
// which units are still whole. And every gather says which one it is (GatheredFetch): where ranks issue different ones,
// after all, it is an error, and no unit gets the values of another.
void Units::gather(Unit& unit, Fetch::Use use) {
  const bool was_expected = use == Fetch::Use::kCompute && unit.is_prefetched;
  if (!was_expected) {
    drop_prefetched(/*waits=*/true);
  }
  if (use != Fetch::Use::kCompute) {
    return;
  }
  forecast_.add(index_of(unit));
  if (!was_expected) {
    prefetch(unit);
  }
  unit.is_prefetched = false;
  prefetch_ahead();
}

void Units::prefetch_ahead() {
  UnitForecast::Place place = forecast_.place();
  for (size_t steps = 0; steps < units_.size(); ++steps) {
    const int64_t next = forecast_.next(place);
    if (next == UnitForecast::kNone) {
      return;
    }
    place = place.then(next);
    Unit& unit = units_[next];
    if (unit.is_prefetched) {
      continue;
    }
    if (!has_room_for(unit)) {
      return;
    }
    prefetch(unit);
  }
}

void Units::prefetch(Unit& unit) {
  unit.is_prefetched = true;
  for (FlatParameter* flat : unit.flats) {
    fetch_->prefetch(*flat);
  }
}

bool Units::has_room_for(const Unit& unit) const {
  int64_t numel = 0;
  for (const Unit& other : units_) {
    numel += other.is_prefetched ? numel_of(other) : 0;
  }
  return numel == 0 ? options_.prefetch_numel > 0 : numel + numel_of(unit) <= options_.prefetch_numel;
}

void Units::drop_prefetched(bool waits) {
  fetch_->drop_prefetched(waits);
  for (Unit& unit : units_) {
    unit.is_prefetched = false;
  }
}

void Units::end_pass() {
  forecast_.end();
  drop_prefetched(/*waits=*/true);
}

void Units::forget_passes() {
  forecast_.forget();
  drop_prefetched(/*waits=*/false);
}

void Units::reshard(Unit& unit) {
  if (full_depth_ > 0 || !options_.stage.shards_parameters) {
    return;
  }
  at::NoGradGuard no_grad;
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
    reshard(unit);
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

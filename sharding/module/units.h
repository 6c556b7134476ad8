// All units of a model, and which of them are whole.
//
// The fetch that makes them whole and the ledger of what programs write belong here: a unit shows this rank's own
// writes as long as it is whole.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/fetch/fetch.h"
#include "sharding/module/unit.h"
#include "sharding/module/unit_budget.h"
#include "sharding/module/unit_forecast.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"
#include "sharding/parameters/write_ledger.h"

namespace zeropg {

// What is known of one unit before its parameters have memory: ungrouped, in named_parameters() order.
struct UnitSource {
  std::string name;
  std::vector<FlatParameter::Source> parameters;
};

// The units of a model, of which the last is the root.
struct ModelSource {
  std::vector<UnitSource> units;
  c10::Device device;
  std::vector<int64_t> order;  // in which units are taken over: every index once, the same on every rank
  // The parameters of a unit, as its UnitSource has them; asked for once, when the units before it have been taken
  // over.
  std::function<std::vector<at::Tensor>(int64_t unit)> take;
};

class Units {
 public:
  Units(Communicator& communicator, const ShardingOptions& options, const ModelSource& source);
  // Takes over all parameters, one unit after the other, and gives them rank 0's values and a home, so that no more
  // than one unit is in memory twice. They are left sharded. Collective; called once. `answer`: to the ledger.
  void adopt(const ModelSource& source, std::function<WriteLedger::Answer()> answer);

  Unit& operator[](int64_t index) { return units_[index]; }
  Unit& of(const FlatParameter& flat) { return units_[unit_of_.at(&flat)]; }
  std::vector<Unit>& all() { return units_; }
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }
  std::vector<FlatParameter*> flat_pointers() const;
  // The root first: its forward begins before those of the others.
  std::vector<FlatParameter*> forward_order() const;
  // What can be trained, in the order in which a backward finishes it.
  std::vector<FlatParameter*> backward_order() const;
  Fetch& fetch() const { return *fetch_; }
  WriteLedger& ledger() const { return *ledger_; }

  // Collective where the fetch is.
  void unshard(Unit& unit, Fetch::Use use = Fetch::Use::kCompute);
  void reshard(Unit& unit);  // unless it persists; not inside begin_full/end_full
  void reshard_all();        // also those that persist
  // Around the forward of a unit that is whole, in any pass.
  void begin_forward(Unit& unit) { budget_.begin_forward(index_of(unit)); }
  void end_forward(Unit& unit) { budget_.end_forward(index_of(unit)); }
  // In place of reshard, after a forward that a backward may follow: the unit, or others, may stay whole for it.
  void reshard_or_keep(Unit& unit);
  // A forward outside of a backward begins, or a backward ends: what was kept or gathered ahead is dropped, since
  // nothing is expected beyond.
  void end_pass();
  // A pass was interrupted, perhaps on this rank alone: what is on its way is left alone, and what was learned
  // forgotten.
  void forget_passes();
  // Every unit is whole in between. Nest; `writable` counts for the outermost. All is as before where it throws.
  void begin_full(bool writable);
  void end_full();
  int full_depth() const { return full_depth_; }
  bool is_full_for_writing() const { return full_depth_ > 0 && is_full_writable_; }
  bool is_full_for_reading() const { return full_depth_ > 0 && !is_full_writable_; }

  // Units stay whole after their forward and backward, until reshard_all.
  void keep_whole(bool keeps_whole) { keeps_whole_ = keeps_whole; }
  bool keeps_whole() const { return keeps_whole_; }
  // Fetch::end_update of all: units that it leaves on their way are whole again when they are needed.
  void end_update(Fetch::Change change);
  // Waits for what an overlapped step has left on its way: before anything but a unit's own forward reads or writes
  // parameters or masters. Not collective.
  void join();
  // While masters are updated nothing may be made whole.
  void set_updating(bool is_updating) { is_updating_ = is_updating; }
  bool is_updating() const { return is_updating_; }

 private:
  // What source.take gives; where that throws on one rank, it is an error on all. Collective.
  std::vector<at::Tensor> take_together(const ModelSource& source, int64_t index);
  int64_t index_of(const Unit& unit) const { return &unit - units_.data(); }
  void note_arriving();
  bool gathers() const { return fetch_->is_collective() && full_depth_ == 0; }
  void gather(Unit& unit, Fetch::Use use);
  void take_kept(Unit& unit);
  void prefetch(Unit& unit);
  void prefetch_ahead();
  void make_sharded(Unit& unit);
  void make_sharded(const UnitBudget::Units& given_up);
  void drop_prefetched(bool waits);

  Communicator& communicator_;
  const ShardingOptions& options_;
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::vector<Unit> units_;
  std::map<const FlatParameter*, int64_t> unit_of_;
  std::unique_ptr<Fetch> fetch_;
  std::unique_ptr<WriteLedger> ledger_;
  UnitForecast forecast_;
  UnitBudget budget_;
  int full_depth_ = 0;
  bool is_full_writable_ = false;
  bool keeps_whole_ = false;
  bool is_updating_ = false;
};

}  // namespace zeropg

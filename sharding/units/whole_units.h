// Which units of a model are whole: makes them whole, and sharded again.
//
// Note [Running units]
// A unit stays whole until the outermost of its forwards ends: it may call itself, or its model (self-conditioning), or
// differentiate inside (forces of an energy), and go on with its parameters. That depends on the path of the program
// alone, as gathers must (Note [Gathering ahead]). Only full_parameters, a load or a step inside of it ends that.
//
// The fetch that makes them whole and the ledger of what programs write belong here: a unit shows this rank's own
// writes as long as it is whole.
#pragma once

#include <functional>
#include <memory>

#include "sharding/comm/communicate.h"
#include "sharding/fetch/fetch.h"
#include "sharding/parameters/options.h"
#include "sharding/parameters/write_ledger.h"
#include "sharding/units/unit.h"
#include "sharding/units/unit_prefetcher.h"
#include "sharding/units/units.h"

namespace zeropg {

class WholeUnits {
 public:
  // Chooses the fetch. Collective. `answer`: to the ledger.
  WholeUnits(Communicator& communicator, const ShardingOptions& options, Units& units,
             std::function<WriteLedger::Answer()> answer);
  WholeUnits(const WholeUnits&) = delete;  // the prefetcher calls this one

  Fetch& fetch() { return *fetch_; }
  const Fetch& fetch() const { return *fetch_; }
  WriteLedger& ledger() { return ledger_; }

  // Collective where the fetch is.
  void unshard(Unit& unit, Fetch::Use use = Fetch::Use::kCompute);
  void reshard(Unit& unit);  // unless it persists, or its forward runs; not inside begin_full/end_full
  void reshard_all();        // also those
  // Around the forward of a unit that is whole, in any pass.
  void begin_forward(const Unit& unit) { prefetcher_.begin_forward(unit); }
  void end_forward(const Unit& unit) { prefetcher_.end_forward(unit); }
  // In place of reshard, after a forward that a backward may follow: the unit, or others, may stay whole for it.
  void reshard_or_keep(Unit& unit);
  // A forward outside of a backward begins, or a backward ends: what was kept or gathered ahead is dropped, since
  // nothing is expected beyond.
  void end_pass();
  // A pass was interrupted, perhaps on this rank alone.
  void forget_passes() { prefetcher_.forget_passes(); }

  // Every unit is whole in between. Nest; `writable` counts for the outermost. All is as before where it throws.
  void begin_full(bool writable);
  void end_full();
  int full_depth() const { return full_depth_; }  // how many begin_full wait for their end_full
  bool is_full_for_writing() const { return full_depth_ > 0 && is_full_writable_; }
  bool is_full_for_reading() const { return full_depth_ > 0 && !is_full_writable_; }

  // Units stay whole after their forward and backward, until reshard_all.
  void keep_whole(bool keeps_whole) { keeps_whole_ = keeps_whole; }
  bool keeps_whole() const { return keeps_whole_; }

  // While masters are updated nothing may be made whole.
  void set_updating(bool is_updating) { is_updating_ = is_updating; }
  bool is_updating() const { return is_updating_; }
  // Fetch::end_update of all: units that it leaves on their way are whole again when they are needed.
  void end_update(Fetch::Change change);
  // Whether any step has left weights on their way.
  bool has_overlapped() const { return has_overlapped_; }
  // Waits for those of the last step; at once where there are none. Before anything but a unit's own forward reads or
  // writes parameters or masters. Not collective.
  void join();

 private:
  bool gathers() const { return fetch_->is_collective() && full_depth_ == 0; }
  void make_sharded(Unit& unit);  // unless its forward runs: Note [Running units]
  void drop(Unit& unit);
  void note_arriving();

  Communicator& communicator_;
  const ShardingOptions& options_;
  Units& units_;
  std::unique_ptr<Fetch> fetch_;
  WriteLedger ledger_;
  UnitPrefetcher prefetcher_;
  int full_depth_ = 0;
  bool is_full_writable_ = false;
  bool keeps_whole_ = false;
  bool is_updating_ = false;
  bool has_overlapped_ = false;
};

}  // namespace zeropg

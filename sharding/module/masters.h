// This rank's masters: how they take what programs write to parameters, load and sum, and how others get to see them.
#pragma once

#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/parameters/options.h"
#include "sharding/units/units.h"
#include "sharding/units/whole_units.h"

namespace zeropg {

extern const char* const kReplicasDiffer;  // why Masters::unite_replicas returned false

// Two digests of the numbers in an optimizer's param groups, each of which rounds them at other places: ranks whose
// numbers differ in the last digits have one in common. Not 0 where there is an optimizer.
using OptionDigests = std::pair<int64_t, int64_t>;

// What a rank goes by in a step, which must be the same on all: its options, and which parameters have a gradient.
// Zeros outside of steps.
struct StepPlan {
  OptionDigests options{0, 0};
  int64_t gradients = 0;
  bool is_load = false;  // masters are about to be replaced, whatever they are
};

// What `action` throws, or null.
std::exception_ptr failure_of(const std::function<void()>& action);

// Makes room for the masters of all units in their tier, if there is one. Collective with offload. To be called before
// the fetch takes its memory, which may be the same: where it suffices for one of them, the masters have it.
void reserve_masters(Communicator& communicator, const ShardingOptions& options, const Units& units);

class Masters {
 public:
  Masters(Communicator& communicator, const ShardingOptions& options, const Units& units, WholeUnits& whole_units)
      : communicator_(communicator), options_(options), units_(units), whole_units_(whole_units) {}

  // Gives the masters what the program has written to parameters since the last call that did; every step, load and
  // unshard_all does. Collective. Throws, on every rank, where ranks wrote different values; `operation` begins the
  // text. Outside of a backward.
  void settle(const char* operation);
  // Gives this rank's masters what it has written to parameters that are whole; it is settled later. Not collective.
  void refresh_own();

  // Bracket a change of masters, which begins with what the program has written. Collective. Where begin_update throws,
  // the change has ended.
  void begin_update(const char* operation, const StepPlan& plan = {});
  void end_update(Fetch::Change change);
  // Makes what every rank has written to the masters of its own slice known to all. Inside an update. Collective.
  void publish();
  // After anything but a step has written masters: false, on every rank, where replicas wrote different values. All
  // then have those of the first replica. Inside an update. Collective where the model has replicas.
  bool unite_replicas(const char* operation);
  // Sets what this rank updates of elements [first, first + value.numel()) of the flattened parameter, at the master's
  // precision. Inside an update.
  void load(int64_t flat, int64_t slot, const at::Tensor& value, int64_t first = 0);
  at::Tensor gather(int64_t flat);  // [total_numel], master dtype; collective

 private:
  // The fetch's begin_update, with an error that names the operation where not all ranks come. Collective.
  bool begin_fetch_update(const char* operation, int64_t news);
  // Whether each of several ranks updates all masters of the model's one copy, alike: Note [Drift].
  bool update_everything() const;
  // Throws, on every rank, where those have got different masters. Collective.
  void check_not_drifted(const char* operation);
  // Throws, on every rank, where ranks are about to step differently. Collective.
  void check_plans(const char* operation, const StepPlan& plan);
  // Throws `failure`, or on ranks that have none what says that those with other parts of tensors failed, or are about
  // to step differently. Collective over all of them.
  void check_parts(const char* operation, const StepPlan& plan, const std::exception_ptr& failure);
  // Throws `failure`, or that of another rank. Collective with offload.
  void fail_together(const std::exception_ptr& failure, const char* operation, const char* could_not, int code);
  int64_t sample() const;
  void apply(const std::vector<WriteLedger::Change>& changes);
  void write_back(FlatParameter& flat, int64_t start, const at::Tensor& written, const at::Tensor& unwritten);
  at::Tensor gather_slices(const at::Tensor& mine);

  Communicator& communicator_;
  const ShardingOptions& options_;
  const Units& units_;
  WholeUnits& whole_units_;
  int64_t steps_ = 0;
  int64_t sample_ = 0;  // what the last update has left of this rank's masters; 0 where that was no step
};

}  // namespace zeropg

// A sharded model: its units, and what happens to them in forward, backward and step.
//
// One thread at a time (the one that runs the training loop). Nothing here needs the GIL.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/module/backward.h"
#include "sharding/module/forward.h"
#include "sharding/module/gradient_access.h"
#include "sharding/module/masters.h"
#include "sharding/module/state_offload.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"
#include "sharding/units/model_source.h"
#include "sharding/units/units.h"
#include "sharding/units/whole_units.h"

namespace zeropg {

class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  // Takes over all parameters. Rank 0's values win. Collective.
  // `reduction_groups`: the same ranks, for gradients. Gathers follow the path through the model and gradients the
  // fixed order of buckets, so the two meet differently on each rank: where units are gathered over the same group,
  // gradients are collected and sent after backward. A replica group of `reduction_groups` serves nothing else.
  static std::shared_ptr<ShardedModule> create(const ModelSource& source, RankGroups groups,
                                               RankGroups reduction_groups, const ShardingOptions& options);

  // --- forward and backward ---
  Forward& forward() { return *forward_; }
  Backward& backward() { return *backward_; }
  // Whether gradients are averaged over the ranks, or stay each rank's own: for stages that do not shard them.
  void set_averages_gradients(bool averages);
  bool averages_gradients() const { return reducer_->context().averages; }
  // Of gradients, from the next backward on; what earlier ones have lost is still owed. The same on every rank.
  void set_codecs(const CodecTable& codecs) { reducer_->context().options.codecs = codecs; }

  // --- access between steps ---
  void settle_writes(const char* operation);  // Masters::settle, wherever it is called
  // `shard`, a part of this rank's masters, for reading. What is written through a raw pointer (numpy()) is published
  // at the next settle_writes or begin_step.
  at::Tensor read_only_shard(const at::Tensor& shard, const std::string& message);
  void unshard_all(bool writable);  // collective; nests; all is as before where it throws
  // Collective; if writable, what was written becomes the parameters' value. All units are sharded again, and no rank
  // waits for this one, also where it throws: TierError, on every rank, for masters that a tier does not take.
  void reshard_all();
  // Gives the parameters back to the user, whole and in their own dtype. The module is of no use afterwards.
  // Collective.
  void dissolve();

  // --- step ---
  // Collective. `options`: of the param groups that the step goes by; RuntimeError on every rank, and nothing begins,
  // where ranks have others or gradients of other parameters. Zeros: before a load.
  void begin_step(const OptionDigests& options = {});
  // Collective. `overlaps`: in stages 1 and 2 it only sends the new weights; units wait for their own in the next
  // forward, and every call here that needs some of them for all (WholeUnits::join).
  void end_step(bool overlaps = false);
  void join_step() { whole_units_->join(); }  // waits for what it has left on its way; not collective
  // Instead of end_step where masters were changed by anything else than a step; collective. False, on every rank,
  // where replicas wrote different values (Masters::unite_replicas). `replaces_all`: no parameter is what it was, and
  // autograd refuses graphs of before.
  [[nodiscard]] bool end_load(bool replaces_all = false);
  GradientAccess& gradients();  // RuntimeError where they are offloaded
  // What a program keeps elsewhere between steps; settle_writes() before it moves anything.
  StateOffload& state_offload() { return *state_offload_; }
  Masters& masters() { return *masters_; }

  // --- facts ---
  const Units& units() const { return *units_; }
  const WholeUnits& whole_units() const { return *whole_units_; }
  const ShardingOptions& options() const { return options_; }
  const Communicator& communicator() const { return communicator_; }
  double communication_seconds() const { return communicator_.seconds() + reductions_.seconds(); }
  std::map<std::string, int64_t> memory_report() const;  // as in memory_report.h
  // Names of parameters whose data was replaced by what cannot be taken over.
  std::vector<std::string> changed_parameters();

 private:
  ShardedModule(RankGroups groups, RankGroups reduction_groups, const ShardingOptions& options);
  void build(const ModelSource& source);
  WriteLedger::Answer answer_to_write() const;
  void end_update(Fetch::Change change);

  Communicator communicator_;
  Communicator reductions_;
  ShardingOptions options_;
  std::unique_ptr<Units> units_;
  std::unique_ptr<WholeUnits> whole_units_;
  std::unique_ptr<Masters> masters_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<StateOffload> state_offload_;
  std::unique_ptr<Backward> backward_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<GradientAccess> gradients_;
};

}  // namespace zeropg

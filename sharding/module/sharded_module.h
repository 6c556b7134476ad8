// A sharded model: its units, and what happens to them in forward, backward and step.
//
// One thread at a time (the one that runs the training loop). Nothing here needs the GIL.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/fetch/fetch.h"
#include "sharding/module/gradient_reducer.h"
#include "sharding/module/unit.h"
#include "sharding/module/unit_order.h"
#include "sharding/parameters/flat_parameter.h"
#include "sharding/parameters/options.h"
#include "sharding/parameters/write_ledger.h"

namespace zeropg {

class ShardedModule : public std::enable_shared_from_this<ShardedModule> {
 public:
  // The parameters of one unit, ungrouped, in named_parameters() order.
  struct UnitSource {
    std::string name;
    std::vector<FlatParameter::Source> parameters;
  };

  // Takes over all parameters. The last unit is the root. Rank 0's values win. Collective.
  // `reduction_group`: the same ranks, for gradients. Gathers follow the path through the model and gradients the fixed
  // order of buckets, so the two meet differently on each rank: where units are gathered over the same group,
  // gradients are collected and sent after backward.
  static std::shared_ptr<ShardedModule> create(const std::vector<UnitSource>& units,
                                               c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               c10::intrusive_ptr<c10d::ProcessGroup> reduction_group,
                                               const ShardingOptions& options);

  // --- forward and backward; `unit` is an index into the sources ---
  // Returns the inputs to use instead: those that need a gradient are replaced by an alias of their own, whose hook
  // says that the unit has finished its backward. `has_other_inputs`: some that need a gradient cannot be replaced;
  // the unit then stays whole until backward ends.
  std::vector<at::Tensor> pre_forward(int64_t unit, const std::vector<at::Tensor>& inputs,
                                      bool has_other_inputs = false);
  void post_forward(int64_t unit, const std::vector<at::Tensor>& outputs);
  void abandon_forward(int64_t unit);  // instead of post_forward where it raised
  void set_synchronize(bool synchronize) { synchronize_ = synchronize; }
  bool synchronizes() const { return synchronize_; }
  // Whether gradients are averaged over the ranks, or stay each rank's own: for stages that do not shard them.
  void set_averages_gradients(bool averages);
  bool averages_gradients() const { return reducer_->averages(); }

  // --- access between steps ---
  // Gives the masters what the program has written to parameters since the last call that did; every step, load and
  // unshard_all does. Collective. Throws, on every rank, where ranks wrote different values; `operation` begins the
  // text.
  void settle_writes(const char* operation);
  // Gives this rank's masters what it has written to parameters that are whole; it is settled later. Not collective.
  void refresh_own_masters();
  // `shard`, a part of this rank's masters, for reading. What is written through a raw pointer (numpy()) is published
  // at the next settle_writes or begin_step.
  at::Tensor read_only_shard(const at::Tensor& shard, const std::string& message);
  // Makes what every rank has written to the masters of its own slice known to all. Inside begin_step/end_step.
  // Collective.
  void publish_shards();
  void unshard_all(bool writable);  // collective; nests; all is as before where it throws
  // Collective; if writable, what was written becomes the parameters' value. All units are sharded again, and no rank
  // waits for this one, also where it throws: TierError, on every rank, for masters that a tier does not take.
  void reshard_all();
  at::Tensor gather_master(int64_t flat);  // [total_numel], master dtype; collective
  // Sets what this rank updates of elements [start, start + value.numel()) of the flattened parameter, at the master's
  // precision. Inside begin_step/end_step.
  void load_parameter(int64_t flat, int64_t slot, const at::Tensor& value, int64_t start = 0);

  // Gives the parameters back to the user, whole and in their own dtype. The module is of no use afterwards.
  // Collective.
  void dissolve();

  // --- step ---
  void begin_step();  // collective
  void end_step();    // collective
  at::Tensor gradient(int64_t flat);
  bool has_gradient(int64_t flat, int64_t slot) const;
  void zero_gradients();
  void scale_gradients(double factor);  // of the whole model, in place
  void show_full_gradients();           // collective; until hide_full_gradients every `.grad` is whole
  void hide_full_gradients();
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);  // collective

  // --- facts ---
  int full_depth() const { return full_depth_; }  // how many unshard_all wait for their reshard_all
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }
  const ShardingOptions& options() const { return options_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return communicator_.group(); }
  int64_t rank() const { return communicator_.rank(); }
  int64_t world_size() const { return communicator_.world_size(); }
  const char* fetch_name() const { return fetch_->name(); }
  double communication_seconds() const { return communicator_.seconds() + reductions_.seconds(); }
  // Bytes of this rank by class: parameters, masters, gathered units, gradients, buckets of the reducer, residuals of
  // compression; with offload also what is in the tier, and the staging buffers.
  std::map<std::string, int64_t> memory_report() const;
  // Names of parameters whose data was replaced by what cannot be taken over.
  std::vector<std::string> changed_parameters();

 private:
  ShardedModule(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::ProcessGroup> reduction_group,
                const ShardingOptions& options);
  void build(const std::vector<UnitSource>& units);
  void reserve_masters();
  // Throws `failure`, or that of another rank: what a disk refuses to one must be an error on all of them, before they
  // wait for each other. Collective with offload.
  void fail_together(const std::exception_ptr& failure, const char* operation, const char* could_not, int code);
  std::vector<FlatParameter*> backward_order() const;
  void install_hooks();

  void unshard(Unit& unit, bool writable = false);
  void reshard(Unit& unit);
  void reshard_units();
  void notice_unfrozen();
  void begin_backward();
  void before_gradient(FlatParameter& flat);
  void finish_backward();
  void before_unit_backward(Unit& unit);
  void after_gradient(FlatParameter& flat);
  void maybe_reshard_in_backward(Unit& unit);
  std::vector<FlatParameter*> all_flats() const;
  WriteLedger::Answer answer_to_write() const;
  void begin_update(const char* operation);
  at::Tensor gather_slices(const at::Tensor& mine);
  void apply(const std::vector<WriteLedger::Change>& changes);
  void write_back(FlatParameter& flat, int64_t start, const at::Tensor& written);
  void check_outside_backward(const char* operation) const;
  void recover_from_broken_backward();
  std::string context(const char* operation) const;  // "[zeropg rank 1/4] clip_grad_norm_: "

  Communicator communicator_;
  Communicator reductions_;
  ShardingOptions options_;
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::vector<Unit> units_;
  std::map<const FlatParameter*, int64_t> unit_of_;
  std::unique_ptr<Fetch> fetch_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<WriteLedger> ledger_;
  bool synchronize_ = true;
  bool is_updating_ = false;   // between begin_step and end_step
  int64_t forward_depth_ = 0;  // units whose forward runs; too many after one that raised, until the root's next
  bool is_in_backward_ = false;
  bool accumulates_ = false;  // the backward that runs puts gradients into `.grad`: not autograd.grad()
  int backward_task_ = -1;    // autograd's number of it
  bool creates_graph_ = false;
  // A backward with create_graph has run: what it made reads parameters again, so units stay whole until the backward
  // through that.
  bool keeps_whole_ = false;
  std::weak_ptr<void> backward_token_;  // lives as long as autograd means to call finish_backward
  UnitOrder unshard_order_;             // since ranks last compared it; kept where unsharding is collective
  int full_depth_ = 0;
  bool is_full_writable_ = false;
};

}  // namespace zeropg

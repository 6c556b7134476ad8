// The compiled side of a sharded module; FullyShardedModule, ShardedUnit and ShardedOptimizer call it.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace zeropg {

struct FullyShardOptions {
  // 0: nothing is sharded (as DDP); 1: masters and optimizer state; 2: gradients too; 3: parameters too.
  int64_t stage = 3;
  // Dtype of computation, and of floating inputs; default: each parameter's own. 16-bit parameters have fp32 masters,
  // which are what is updated and saved.
  std::optional<c10::ScalarType> param_dtype = std::nullopt;
  // Dtype of gradients between ranks; default: the masters' (fp32, or fp64).
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  // Stage 3: false keeps a unit whole from its forward to its backward (memory for speed).
  bool reshard_after_forward = true;
  // Where units are gathered, numbers of elements. Ahead of the unit that runs: one unit, and more while they have so
  // many together; 0: none.
  int64_t prefetch_numel = 1;
  // Whole from a forward to its backward, and gathered once, not twice: the last units that have so many together.
  int64_t keep_numel = 0;
  // Of a unit that stays whole from its first use after a step to the next step.
  int64_t persistent_numel = 0;
  // Whole, or on their way, at once; what runs and the root always are. std::nullopt: no limit.
  std::optional<int64_t> max_whole_numel = std::nullopt;
  // A second group of the same ranks. Where units are gathered (stage 3 over other backends, or over several nodes)
  // gradients then travel while backward runs; without it they are sent after backward.
  c10::intrusive_ptr<c10d::Backend> reduction_group = {};
};

// Names and values of a whole model, as state_dict() in Python.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

class ShardedUnitBase;

// One per sharded model, shared by its units. One thread at a time: the one that trains. "Collective": all ranks call.
class ShardedCore {
 public:
  // The part of a trainable parameter that this rank updates.
  struct UpdateRange {
    std::string name;
    at::Tensor parameter;  // the model's own
    at::Tensor values;     // 1-D, in the masters' dtype, a view of what the model owns; undefined where there is none
  };

  // Takes over the parameters of `root`, which must be a ShardedUnit. Rank 0's values win. Collective. Throws
  // ValueError where ranks bring different models or options, or a model without parameters.
  static std::shared_ptr<ShardedCore> create(const std::shared_ptr<torch::nn::Module>& root,
                                             const c10::intrusive_ptr<c10d::Backend>& group,
                                             const FullyShardOptions& options);
  ~ShardedCore();

  // Replaces each input by what the unit must use instead.
  void before_forward(int64_t unit, const std::vector<at::Tensor*>& inputs);
  void after_forward(int64_t unit, const std::vector<at::Tensor>& outputs);

  void set_synchronize(bool synchronize);
  void unshard_all(bool writable);                                                    // collective
  void reshard_all();                                                                 // collective
  StateDict full_state_dict(std::optional<c10::ScalarType> dtype);                    // collective
  void load_full_state_dict(const StateDict& state);                                  // collective
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);  // collective
  void zero_gradients();

  const std::vector<UpdateRange>& update_ranges() const;  // one per trainable parameter, also where it is empty
  // Between the two calls `values.grad()` of every update range is its averaged gradient, or undefined where no rank
  // produced one, and `values` may be changed. Both collective.
  void begin_step();
  void end_step();

  int64_t rank() const;
  int64_t world_size() const;
  // "replicated", "shared" (stage 3 inside a node: one copy, nothing is gathered) or "gathered".
  std::string fetch_name() const;

 private:
  struct State;
  explicit ShardedCore(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// What a ShardedUnit of any type has: its place in a sharded model. Copies of a unit have none.
class ShardedUnitBase {
 public:
  ShardedUnitBase() = default;
  ShardedUnitBase(const ShardedUnitBase&) {}
  ShardedUnitBase& operator=(const ShardedUnitBase&) = delete;
  virtual ~ShardedUnitBase() = default;

 protected:
  friend class ShardedCore;
  std::shared_ptr<ShardedCore> core_;  // null until the model is sharded; life shared with the model's other units
  int64_t unit_ = 0;
};

}  // namespace zeropg

// Elementwise optimizers over contiguous flat ranges of a model's master weights.
//
// A sharded rank owns flat ranges, not tensors with shapes, so the interface is one range: everything that a step reads
// and writes for it, in one pass over memory. Optimizers that need whole matrices do not fit it by design.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sharding/optim/state_format.h"

namespace zeropg {

// By torch.optim's name; `betas` is `beta1` and `beta2`, booleans are 0 and 1.
using Hyperparameters = std::unordered_map<std::string, double>;

// One contiguous range of parameters. All tensors are CPU, 1-D and contiguous; none needs an alignment. A range with
// state in blocks begins at a multiple of kStateBlock elements.
struct FlatView {
  at::Tensor master;              // [numel], float32 or float64; updated in place
  at::Tensor gradient;            // [numel], master's dtype, or bfloat16 / float16 beside a float32 master; only read
  std::vector<at::Tensor> state;  // [entries_of(numel)] per state slot, zeros at first; in place
  at::Tensor parameter_out;       // [numel] in any floating dtype, or undefined: receives the rounded new master
};

struct StepArguments {
  Hyperparameters hyperparameters;
  int64_t step = 1;              // 1 in the first step of this range
  double gradient_factor = 1.0;  // multiplied into each gradient: clip coefficient times the inverse of the loss scale
};

// What an optimizer is: whoever steps, plans or measures optimizers asks this, never a name.
struct OptimizerTraits {
  // A name that step() demands in StepArguments::hyperparameters, and a value to measure with. A name that begins with
  // `initial_` is added to a slot's zeros in the first step; where a program has put state there, it is 0.
  struct Hyperparameter {
    std::string_view name;
    double typical;
  };

  std::string_view name;  // in registry.cpp
  std::vector<Hyperparameter> hyperparameters;
  bool counts_steps = true;  // those classes keep `step` beside the state slots
  // Classes whose update it is, of torch.optim, or else of zeropg.optim; "zeropg.optim.AdamW" where torch has one of
  // that name. The first is that by torch_flags and its defaults.
  std::vector<std::string_view> torch_classes;
  // Options of those classes' param groups that must be so (flags are 0 and 1); where a group lacks one, the class's
  // default counts.
  std::vector<std::pair<std::string_view, int64_t>> torch_flags;
};

// One optimizer algorithm. It holds no state of a training run, so one object serves any number of ranges and threads.
//
// Invariant, see Note [Same bits] in elementwise.h: the result of an element depends on the inputs of that element
// alone, or of its block where state lies in blocks, never on alignment, on where the range was cut, on the number of
// threads, or on the instruction set.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual OptimizerTraits traits() const = 0;

  // The state tensors that these hyperparameters take, in the order of FlatView::state, by torch.optim's names.
  virtual std::vector<StateSlot> state_slots(const Hyperparameters& hyperparameters) const = 0;

  // Updates master and state in place and writes parameter_out. Blocks until done; uses at most at::get_num_threads()
  // threads. ValueError: sizes, slots or hyperparameters that do not fit; TypeError: a dtype or device that it does not
  // take.
  virtual void step(const FlatView& view, const StepArguments& arguments) const = 0;
};

// Elements [start, stop) of a view with this state. ValueError where blocks of state do not begin at `start`.
FlatView cut(const FlatView& view, const std::vector<StateSlot>& slots, int64_t start, int64_t stop);

// The value, or ValueError naming the key that is missing or not a number.
double hyperparameter(const Hyperparameters& hyperparameters, const std::string& name);

}  // namespace zeropg

// Forwards of units: what happens before and after each, and the hooks on its inputs and outputs, which begin and end
// its backward.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sharding/comm/communicate.h"
#include "sharding/gradients/gradient_reducer.h"
#include "sharding/module/backward.h"
#include "sharding/module/state_offload.h"
#include "sharding/parameters/options.h"
#include "sharding/units/units.h"
#include "sharding/units/whole_units.h"

namespace zeropg {

// `unit` is an index into the sources.
class Forward {
 public:
  Forward(const Communicator& communicator, const ShardingOptions& options, Units& units, WholeUnits& whole_units,
          const GradientReducer& reducer, const StateOffload& state_offload, Backward& backward)
      : communicator_(communicator),
        options_(options),
        units_(units),
        whole_units_(whole_units),
        reducer_(reducer),
        state_offload_(state_offload),
        backward_(backward) {}

  // `self`: this object, alive as long as all that it refers to.
  void install(const std::weak_ptr<Forward>& self) { self_ = self; }

  // Returns the inputs to use instead: those that need a gradient are replaced by an alias of their own, whose hook
  // says that the unit has finished its backward. `has_other_inputs`: some that need a gradient cannot be replaced;
  // the unit then stays whole until backward ends.
  std::vector<at::Tensor> pre_forward(int64_t unit, const std::vector<at::Tensor>& inputs,
                                      bool has_other_inputs = false);
  void post_forward(int64_t unit, const std::vector<at::Tensor>& outputs);
  void abandon_forward(int64_t unit);  // instead of post_forward where it raised

  bool is_running() const { return depth_ > 0; }
  void forget();  // no forward runs: what one that raised has left

 private:
  void begin(Unit& unit);
  void end(Unit& unit);
  void alias_inputs(Unit& unit, int64_t index, std::vector<at::Tensor>& inputs);
  bool hook_outputs(const Unit& unit, int64_t index, const std::vector<at::Tensor>& outputs);

  const Communicator& communicator_;
  const ShardingOptions& options_;
  Units& units_;
  WholeUnits& whole_units_;
  const GradientReducer& reducer_;
  const StateOffload& state_offload_;
  Backward& backward_;
  std::weak_ptr<Forward> self_;
  bool may_have_backward_ = false;  // the outermost forward began with gradients enabled
  int64_t depth_ = 0;               // units whose forward runs; too many after one that raised, until the root's next
};

}  // namespace zeropg

#include "sharding/module/forward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "sharding/gradients/lambda_pre_hook.h"
#include "sharding/module/memory_report.h"

namespace zeropg {
namespace {

// `function` runs when the gradient of `tensor`, which is no leaf, is there, before what made the tensor runs backward.
void call_before_backward(const at::Tensor& tensor, std::function<void()> function) {
  tensor.grad_fn()->add_tensor_pre_hook(std::make_unique<LambdaPreHook>(std::move(function)));
}

}  // namespace

std::vector<at::Tensor> Forward::pre_forward(int64_t index, const std::vector<at::Tensor>& inputs,
                                             bool has_other_inputs) {
  Unit& unit = units_[index];
  state_offload_.check(StateOffload::kParameters, "forward");
  backward_.recover();
  if (unit.is_root) {
    backward_.notice_unfrozen();
    whole_units_.fetch().note_trained(at::GradMode::is_enabled());
    if (!backward_.is_running()) {
      whole_units_.end_pass();
    }
  }
  whole_units_.unshard(unit);
  if (whole_units_.has_overlapped()) {  // its weights may be shared with units, whose forward may be called alone
    whole_units_.unshard(units_.root());
  }
  begin(unit);
  unit.has_other_inputs = has_other_inputs || unit.running > 0;
  std::vector<at::Tensor> aliases = inputs;
  if (options_.stage.shards_parameters && at::GradMode::is_enabled()) {
    alias_inputs(unit, index, aliases);
  }
  ++unit.running;
  return aliases;
}

void Forward::begin(Unit& unit) {
  // A forward inside a backward (activation checkpointing) is none of its own.
  depth_ = unit.is_root && unit.running == 0 ? 1 : depth_ + 1;
  if (depth_ == 1 && !backward_.is_running()) {
    whole_units_.ledger().begin_forward();
    may_have_backward_ = at::GradMode::is_enabled();
  }
  whole_units_.begin_forward(unit);
  unit.forwards += backward_.is_running() ? 0 : 1;
  unit.forward_began = communicator_.log()->now();
  unit.has_hooked_inputs = false;
}

void Forward::end(Unit& unit) {
  depth_ = std::max<int64_t>(depth_ - 1, 0);
  unit.running = std::max<int64_t>(unit.running - 1, 0);
  if (unit.running == 0) whole_units_.end_forward(unit);
}

void Forward::forget() {
  depth_ = 0;
  for (Unit& unit : units_.all()) unit.running = 0;
}

// The gradients of its inputs are the last that need its parameters.
void Forward::alias_inputs(Unit& unit, int64_t index, std::vector<at::Tensor>& inputs) {
  for (at::Tensor& input : inputs) {
    if (input.requires_grad() && input.layout() != at::kStrided) {
      unit.has_other_inputs = true;
    } else if (input.requires_grad()) {
      input = input.view_as(input);
      unit.has_hooked_inputs = true;
      call_before_backward(input, [weak = self_, index] {
        if (const auto self = weak.lock()) {
          self->backward_.inputs_done(self->units_[index]);
        }
      });
    }
  }
}

void Forward::post_forward(int64_t index, const std::vector<at::Tensor>& outputs) {
  Unit& unit = units_[index];
  end(unit);
  communicator_.log()->add(EventLog::Kind::kForward, unit.name, std::exchange(unit.forward_began, 0));
  communicator_.log()->sample([&] { return memory_report(options_, units_, whole_units_.fetch(), reducer_); });
  const bool needs_backward = hook_outputs(unit, index, outputs);
  // The root's backward follows its forward at once; inside a backward (activation checkpointing) the unit is about to
  // be used.
  const bool keep = needs_backward && (unit.is_root || !options_.reshard_after_forward);
  if (keep || backward_.is_running() || whole_units_.keeps_whole()) {
    return;
  }
  if (may_have_backward_ && !unit.is_root) {  // also under a checkpoint, whose forward has no graph
    whole_units_.reshard_or_keep(unit);
  } else {
    whole_units_.reshard(unit);
  }
}

// Returns whether any of them needs a backward.
bool Forward::hook_outputs(const Unit& unit, int64_t index, const std::vector<at::Tensor>& outputs) {
  bool needs_backward = false;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || !at::GradMode::is_enabled()) {
      continue;
    }
    needs_backward = true;
    if (output.is_leaf()) {  // no backward of the unit lies behind it, and each forward's hook would stay
      continue;
    }
    if (unit.is_root || options_.stage.shards_parameters || communicator_.log()->is_on()) {
      call_before_backward(output,
                           [weak = self_, index, waits = unit.has_hooked_inputs, stays = unit.has_other_inputs] {
                             if (const auto self = weak.lock()) {
                               self->backward_.begin_unit(self->units_[index], waits, stays);
                             }
                           });
    } else if (whole_units_.has_overlapped()) {
      // A backward of a part of the model may read weights before it has any gradient.
      call_before_backward(output, [weak = self_] {
        if (const auto self = weak.lock()) {
          self->whole_units_.join();
        }
      });
    }
  }
  return needs_backward;
}

void Forward::abandon_forward(int64_t index) {
  Unit& unit = units_[index];
  end(unit);
  if (!backward_.is_running() && !whole_units_.keeps_whole()) {
    whole_units_.reshard(unit);
  }
}

}  // namespace zeropg

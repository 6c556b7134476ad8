#include "sharding/module/backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>

namespace zeropg {
namespace {

bool is_autograd_running() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

void Backward::install(const std::weak_ptr<Backward>& self) {
  self_ = self;
  reducer_.install(self);
}

void Backward::notice_unfrozen() {
  for (const auto& flat : units_.flats()) {
    const auto& slots = flat->slots();
    if (!flat->is_trainable() && std::any_of(slots.begin(), slots.end(), [](const ParameterSlot& slot) {
          return slot.parameter().requires_grad();
        })) {
      flat->make_trainable(options_);
    }
  }
  reducer_.notice_unfrozen();
}

void Backward::check_outside(const char* operation) const {
  TORCH_CHECK(!is_running_ || !is_autograd_running(), communicator_.context(operation),
              "called inside a backward; call it after.");
}

// A backward that raised ran no callback at its end: autograd dropped it, and with it the token. Its gradients are
// incomplete and must not reach the next step.
void Backward::recover() {
  const bool still_runs = is_autograd_running() && !token_.expired();
  if (!is_running_ || still_runs) {
    return;
  }
  if (accumulates_) {
    reducer_.abandon_backward();
  }
  accumulates_ = false;
  whole_units_.keep_whole(false);
  is_running_ = false;  // not before: where a signal handler ends the waiting, the next call does this again
  whole_units_.forget_passes();
  for (Unit& unit : units_.all()) {
    unit.end_backward();
    whole_units_.reshard(unit);
  }
}

void Backward::begin() {
  recover();                                              // no forward need lie between that one and this
  const bool creates_graph = at::GradMode::is_enabled();  // autograd sets it so in what it calls
  if (creates_graph) {
    whole_units_.keep_whole(true);
  }
  if (is_running_ && (accumulates_ || !reducer_.will_accumulate())) {
    return;
  }
  // The first gradient of this backward, or of a backward() inside a grad().
  constexpr uint32_t kNeeded = StateOffload::kParameters | StateOffload::kGradients | StateOffload::kBuffers;
  state_offload_.check(kNeeded, "backward");
  whole_units_.join();  // what a forward of a part of the model did not need
  notice_unfrozen();    // parameters may be used without a forward of the root
  whole_units_.fetch().note_trained(true);
  TORCH_CHECK(!reducer_.would_add_to_shown(), communicator_.context("backward"),
              "called inside full_gradients, where this rank's gradient would be added to the average that `.grad` "
              "shows; expected it before or after the `with`. Leave that first, and clone what is still needed of it.");
  if (reducer_.will_accumulate()) {
    reducer_.check_not_lost(communicator_.context("backward"));
    reducer_.begin_backward(synchronize_);
    accumulates_ = true;
  }
  if (is_running_) {
    return;  // a backward() inside a grad(), which ends both
  }
  // From here on it runs, until autograd calls back at its end or drops the token.
  is_running_ = true;
  creates_graph_ = creates_graph;
  task_ = torch::autograd::get_current_graph_task_id();
  const auto token = std::make_shared<int>();
  token_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = self_, token] {
    if (const auto self = weak.lock()) {
      self->finish();
    }
  });
}

void Backward::begin_unit(Unit& unit, bool waits_for_inputs, bool stays_whole) {
  begin();
  unit.waits_for_inputs = waits_for_inputs;
  unit.stays_whole |= stays_whole;
  const bool begins = !std::exchange(unit.is_in_backward, true);
  whole_units_.unshard(unit);
  if (begins) {
    unit.backward_began = communicator_.log()->now();
  }
}

void Backward::inputs_done(Unit& unit) {
  unit.waits_for_inputs = false;
  maybe_reshard(unit);
}

void Backward::before_gradient(FlatParameter& flat) {
  begin();
  // Where checkpoints run backwards inside this one, a parameter that was used twice gets a gradient from each.
  const Unit& unit = units_.of(flat);
  if (torch::autograd::get_current_graph_task_id() != task_ && (unit.is_root || unit.forwards > 1)) {
    reducer_.hold_until_end(flat);
  }
}

void Backward::after_gradient(FlatParameter& flat) { maybe_reshard(units_.of(flat)); }

void Backward::maybe_reshard(Unit& unit) {
  if (unit.is_root || !unit.is_in_backward || unit.waits_for_inputs || unit.stays_whole || whole_units_.keeps_whole() ||
      !accumulates_) {
    return;
  }
  for (const FlatParameter* flat : unit.flats) {
    if (flat->is_trainable() && !reducer_.bucket_of(*flat).is_complete()) {
      return;
    }
  }
  end_unit(unit);
  unit.is_in_backward = false;
  whole_units_.reshard(unit);
}

void Backward::end_unit(Unit& unit) {
  communicator_.log()->add(EventLog::Kind::kBackward, unit.name, std::exchange(unit.backward_began, 0));
}

void Backward::finish() {
  // No unit is needed any more, but by a graph that this backward has made.
  whole_units_.keep_whole(creates_graph_);
  for (Unit& unit : units_.all()) {
    end_unit(unit);
    unit.end_backward();
    if (!creates_graph_) {
      whole_units_.reshard(unit);
    }
  }
  if (!accumulates_) {
    is_running_ = false;
    whole_units_.end_pass();
    return;  // no rank waits for this one
  }
  // Reduce what is left.
  const bool is_reduced = reducer_.synchronizes();
  reducer_.finish_backward();
  is_running_ = false;
  accumulates_ = false;
  whole_units_.end_pass();
  if (is_reduced) {  // else inside no_sync
    end_reduced();
  }
}

void Backward::reduce_accumulated() {
  const char* operation = "reduction of accumulated gradients";
  check_outside(operation);
  recover();
  state_offload_.check(StateOffload::kGradients | StateOffload::kBuffers, operation);
  reducer_.check_not_lost(communicator_.context(operation));
  is_running_ = accumulates_ = true;  // so that recover() cleans up where this throws
  reducer_.begin_backward(/*synchronize=*/true);
  reducer_.finish_backward();
  is_running_ = accumulates_ = false;
  end_reduced();
}

void Backward::end_reduced() {
  // Parameters that forwards renormalized, then hooks of users, which may step.
  if (whole_units_.ledger().is_any_renormalized()) {  // before anything else is written to those parameters
    masters_.settle("backward");
  }
  reducer_.run_hooks();
}

}  // namespace zeropg

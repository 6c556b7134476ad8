#include "sharding/module/state_offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace zeropg {
namespace {

using State = StateOffload::State;

constexpr std::array<std::pair<State, const char*>, 4> kNames = {{
    {State::kParameters, "parameters"},
    {State::kMasters, "masters"},
    {State::kGradients, "gradients"},
    {State::kBuffers, "buffers"},
}};

bool has_masters_apart(const FlatParameter& flat) {
  return !flat.is_own_master() && flat.master.tiered == nullptr && flat.master.values.defined();
}

Move to_host(bool pin_memory, bool non_blocking) {
  return [=](const at::Tensor& values) {
    const at::Tensor host =
        at::empty(values.sizes(), values.options().device(c10::kCPU).pinned_memory(pin_memory && !values.is_cpu()));
    host.copy_(values, non_blocking);
    return host;
  };
}

Move to_device(c10::Device device, bool non_blocking) {
  return [=](const at::Tensor& values) {
    return at::empty(values.sizes(), values.options().device(device)).copy_(values, non_blocking);
  };
}

}  // namespace

State StateOffload::named(const std::string& name) {
  for (const auto& [state, known] : kNames) {
    if (name == known) return state;
  }
  TORCH_CHECK_VALUE(false, "[zeropg] there is no state '", name, "' that could be offloaded");
}

void StateOffload::offload(uint32_t states, bool moves, bool pin_memory, bool non_blocking) {
  const char* operation = "offload_states";
  TORCH_CHECK(whole_units_.full_depth() == 0 && !whole_units_.is_updating(), communicator_.context(operation),
              "called inside full_parameters or writable_shards; call it after the `with`.");
  states &= ~away_;
  if (moves && (states & kGradients) != 0) {
    reducer_.check_can_move(communicator_.context(operation));
  }
  whole_units_.reshard_all();
  away_ |= states;
  if (!moves) {
    return;
  }
  at::NoGradGuard no_grad;
  moved_ |= states;
  const Move move = to_host(pin_memory, non_blocking);
  for (FlatParameter* flat : units_.flat_pointers()) {
    if ((states & kMasters) != 0 && has_masters_apart(*flat)) {
      flat->master.values = move(flat->master.values);
    }
    if ((states & kParameters) != 0) {
      whole_units_.fetch().offload(*flat, move);
    }
  }
  if ((states & kGradients) != 0) {
    reducer_.move_gradients(move);
  }
  if ((states & kBuffers) != 0) {
    reducer_.free_buffers();
  }
}

void StateOffload::reload(bool non_blocking) {
  at::NoGradGuard no_grad;
  for (FlatParameter* flat : units_.flat_pointers()) {
    const Move move = to_device(flat->device(), non_blocking);
    if ((moved_ & kMasters) != 0 && has_masters_apart(*flat)) {
      flat->master.values = move(flat->master.values);
    }
    if ((moved_ & kParameters) != 0) {
      whole_units_.fetch().reload(*flat, move);
    }
  }
  if ((moved_ & kGradients) != 0 && !units_.flats().empty()) {
    reducer_.move_gradients(to_device(units_.flats().front()->device(), non_blocking));
  }
  away_ = moved_ = 0;
}

void StateOffload::check(uint32_t needed, const char* operation) const {
  for (const auto& [state, name] : kNames) {
    TORCH_CHECK((needed & away_ & state) == 0, communicator_.context(operation), name,
                " are offloaded (engine.offload_states); expected them to be back: call engine.reload_states() first.");
  }
}

}  // namespace zeropg

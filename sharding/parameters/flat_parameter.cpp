#include "sharding/parameters/flat_parameter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

#include "sharding/parameters/master.h"

namespace zeropg {

at::Tensor Master::read(int64_t first, int64_t last) const {
  return values.defined() ? values.narrow(0, first, last - first) : tiered->read(first, last);
}

void Master::write(int64_t first, const at::Tensor& from) {
  if (values.defined()) {
    values.narrow(0, first, from.numel()).copy_(from);
  } else {
    tiered->write(first, from);
  }
}

namespace {

c10::ScalarType computation_dtype(c10::ScalarType dtype, const ShardingOptions& options) {
  // Integer and boolean parameters (quantized, frozen weights) are never cast.
  return c10::isFloatingType(dtype) ? options.param_dtype.value_or(dtype) : dtype;
}

std::string sharded_message(const std::string& name) {
  return c10::str("[zeropg] parameter '", name,
                  "' is sharded: its values are on several ranks outside of its module's forward and backward. Read it "
                  "inside `with zeropg.full_parameters(model):`, or take this rank's part from "
                  "zeropg.local_shards(model). A backward raises this where a unit's forward writes its result into an "
                  "argument: return it instead. What is differentiated has to go into a unit by its arguments and out "
                  "by its results (not by an attribute, nor by a method other than forward). A forward that reads "
                  "parameters of modules that it does not call needs them in its own unit: leave those modules out of "
                  "units= (units=[]: one unit). Else run forward and backward, without the step, inside `with "
                  "zeropg.full_parameters(model):`.");
}

std::string arriving_message(const std::string& name) {
  return c10::str("[zeropg] parameter '", name,
                  "' is on its way: its new values, which the last step sent, have not been waited for. The forward of "
                  "its unit does that. To read it before, use `with zeropg.full_parameters(model):`, which waits for "
                  "all; to write it, the same with writable=True. Without overlap_step=True steps wait themselves.");
}

}  // namespace

FlatParameter::FlatParameter(std::string unit_name, std::vector<Source> sources, const ShardingOptions& options,
                             c10::Device device, int64_t rank, int64_t world_size)
    : unit_name_(std::move(unit_name)),
      original_dtype_(sources.front().dtype),
      dtype_(computation_dtype(original_dtype_, options)),
      master_dtype_(c10::isFloatingType(original_dtype_) ? master_dtype_of(original_dtype_) : dtype_),
      device_(device),
      is_trainable_(sources.front().requires_grad),
      is_encoded_(sources.front().is_encoded),
      may_send_differences_(is_encoded_ && options.weights.codec != nullptr && options.stage.shards_optimizer &&
                            !options.stage.shards_parameters && world_size > 1),
      rank_(rank),
      sources_(std::move(sources)) {
  if (!is_trainable_) {
    master_dtype_ = original_dtype_;  // never updated, but saved as it came
  }
  std::vector<int64_t> numels;
  for (const Source& source : sources_) {
    numels.push_back(c10::multiply_integers(source.sizes));
  }
  layout_ = make_flat_layout(numels, world_size);
}

at::Tensor FlatParameter::take_over(const std::vector<ParameterTensors>& of_unit) {
  at::NoGradGuard no_grad;
  at::Tensor values = at::zeros({layout_.total_numel}, at::TensorOptions().dtype(original_dtype_).device(device_));
  slots_.reserve(sources_.size());
  for (const Source& source : std::exchange(sources_, {})) {
    const ParameterTensors& tensors = of_unit.at(source.index);
    const at::Tensor& parameter = tensors.local;
    TORCH_CHECK(parameter.sizes() == source.sizes && parameter.scalar_type() == original_dtype_ &&
                    parameter.device() == device_,
                "[zeropg] fully_shard: parameter '", source.names.front(), "' is ", parameter.sizes(), " ",
                parameter.scalar_type(), " on ", parameter.device(), "; expected ", source.sizes, " ", original_dtype_,
                " on ", device_, ", as when it was planned.");
    const int64_t offset = layout_.offsets[slots_.size()];
    const int64_t numel = parameter.numel();
    values.narrow(0, offset, numel).copy_(parameter.detach().reshape({-1}));
    slots_.push_back({source.names, tensors, source.sizes, offset, numel,
                      ParameterStorage(parameter, dtype_, sharded_message(source.names.front())),
                      source.is_renormalized, source.split});
  }
  return values;
}

std::string FlatParameter::describe() const {
  return c10::str("unit '", unit_name_.empty() ? "(root)" : unit_name_, "' (", c10::toString(dtype_), ", ",
                  is_trainable_ ? "trainable" : "frozen", ", ", layout_.offsets.size(), " parameters)");
}

std::vector<SlotRange> FlatParameter::slots_in(int64_t start, int64_t stop) const {
  std::vector<SlotRange> ranges;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const int64_t from = std::max(start, slots_[i].offset);
    const int64_t to = std::min(stop, slots_[i].offset + slots_[i].numel);
    if (from < to) {
      ranges.push_back({static_cast<int64_t>(i), from - slots_[i].offset, to - slots_[i].offset, from});
    }
  }
  return ranges;
}

void FlatParameter::make_trainable(const ShardingOptions& options) {
  at::NoGradGuard no_grad;
  const int64_t start = options.stage.shards_optimizer ? shard_start() : 0;
  const int64_t numel = options.stage.shards_optimizer ? layout_.shard_numel : layout_.total_numel;
  const c10::ScalarType dtype = master_dtype_of(original_dtype_);
  const int64_t first = start - master.start;
  const at::Tensor home = (is_own_master() ? master.values : parameter_out).narrow(0, first, numel);
  const at::Tensor values = master.read(first, first + numel).to(dtype, /*non_blocking=*/false, /*copy=*/true);
  is_trainable_ = true;
  master_dtype_ = dtype;
  master.start = start;
  master.numel = numel;
  master.tiered.reset();
  if (is_own_master()) {
    master.values = home;
    parameter_out = at::Tensor();
    return;
  }
  parameter_out = sends_differences() ? at::Tensor() : home;
  reserve_master(*this, options);
  if (master.tiered != nullptr) {
    master.tiered->write(0, values);
    master.values = master.tiered->in_place();
  } else {
    master.values = values;
  }
}

void FlatParameter::clear_padding(const at::Tensor& slice) const {
  int64_t end = shard_start();
  const auto clear_until = [&](int64_t start) { slice.narrow(0, end - shard_start(), start - end).zero_(); };
  for (const SlotRange& range : slots_in(shard_start(), shard_start() + slice.numel())) {
    clear_until(range.flat_start);
    end = range.flat_start + range.stop - range.start;
  }
  clear_until(shard_start() + slice.numel());
}

void FlatParameter::attach(const at::Tensor& whole) {
  TORCH_INTERNAL_ASSERT(whole.numel() == layout_.total_numel && whole.scalar_type() == dtype_);
  for (ParameterSlot& slot : slots_) {
    slot.storage.attach(whole, slot.offset, /*is_watched=*/true);
  }
  whole_ = whole;
}

void FlatParameter::detach() {
  for (ParameterSlot& slot : slots_) {
    slot.storage.detach();
  }
  whole_.reset();
}

void FlatParameter::hide() {
  for (ParameterSlot& slot : slots_) {
    slot.storage.detach(arriving_message(slot.names.front()));
  }
  whole_.reset();
}

}  // namespace zeropg

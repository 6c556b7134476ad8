// Python's view of sharding/: the core of a sharded model and its flat parameters.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "python/bindings/bindings.h"
#include "python/bindings/bound_codec.h"
#include "python/bindings/release_gil.h"
#include "sharding/module/sharded_module.h"

namespace py = pybind11;

namespace zeropg {
namespace {

// One flat parameter of a model, as optimizers, state dicts and exports see it. Keeps the model's core alive.
struct FlatGroup {
  std::shared_ptr<ShardedModule> module;
  int64_t index;

  FlatParameter& flat() const { return *module->units().flats()[index]; }

  int64_t slot_of(const at::Tensor& parameter) const {
    const auto& slots = flat().slots();
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].parameter().unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl()) {
        return static_cast<int64_t>(i);
      }
    }
    TORCH_CHECK_VALUE(false, "[zeropg] the parameter does not belong to ", flat().describe());
  }

  // (parameter, name, start, stop) of every parameter in the masters' range; start and stop index the masters.
  py::list segments() const {
    py::list result;
    const FlatParameter& f = flat();
    for (const SlotRange& range : f.slots_in(f.master.start, f.master.start + f.master.numel)) {
      const int64_t start = range.flat_start - f.master.start;
      result.append(py::make_tuple(f.slots()[range.slot].parameter(), f.slots()[range.slot].names.front(), start,
                                   start + range.stop - range.start));
    }
    return result;
  }

  // (name, first, start, stop) of this rank's own slice: elements [start, stop) of the flattened parameter are in the
  // masters from `first` on.
  py::list local_shards() const {
    py::list result;
    const FlatParameter& f = flat();
    for (const SlotRange& range : f.slots_in(f.shard_start(), f.shard_start() + f.layout().shard_numel)) {
      result.append(py::make_tuple(f.slots()[range.slot].names.front(), range.flat_start - f.master.start, range.start,
                                   range.stop));
    }
    return result;
  }

  // (names, parameter, offset, numel) of every parameter in the flat buffer.
  py::list slots() const {
    py::list result;
    for (const ParameterSlot& slot : flat().slots()) {
      result.append(py::make_tuple(slot.names, slot.parameter(), slot.offset, slot.numel));
    }
    return result;
  }
};

std::optional<at::Tensor> defined_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// Names, sizes of its own memory, dtype, whether it is trainable, whether forwards renormalize it, whether it travels
// encoded, which split of RankGroups its tensor has.
using PyParameter =
    std::tuple<std::vector<std::string>, std::vector<int64_t>, c10::ScalarType, bool, bool, bool, int64_t>;
using PySource = std::pair<std::string, std::vector<PyParameter>>;

// A parameter; the local part of one that is distributed, and DistributedTensor's functions.
using PyFunction = std::function<at::Tensor(const at::Tensor&)>;
using PyTensors = std::tuple<at::Tensor, std::optional<std::tuple<at::Tensor, PyFunction, PyFunction>>>;

// What it raises becomes an error that may pass through autograd's threads.
PyFunction without_python_errors(const PyFunction& function) {
  return [function](const at::Tensor& tensor) {
    try {
      return function(tensor);
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  };
}

std::vector<ParameterTensors> parameter_tensors(const std::vector<PyTensors>& of_unit) {
  std::vector<ParameterTensors> result;
  for (const auto& [parameter, part] : of_unit) {
    if (!part) {
      result.emplace_back(parameter);
      continue;
    }
    const auto& [local, local_of, over] = *part;
    result.emplace_back(parameter, local,
                        std::make_shared<DistributedTensor>(
                            DistributedTensor{without_python_errors(local_of), without_python_errors(over)}));
  }
  return result;
}

std::shared_ptr<ShardedModule> create(
    const std::vector<PySource>& units, const c10::Device& device, const std::vector<int64_t>& order,
    const std::function<std::vector<PyTensors>(int64_t)>& take, const RankGroups& groups,
    const RankGroups& reduction_groups, int64_t stage, std::optional<c10::ScalarType> param_dtype,
    std::optional<c10::ScalarType> reduce_dtype, const std::vector<PyCodecRow>& codecs,
    std::shared_ptr<ResidualStore> residuals, const std::optional<BoundCodec>& weights_codec,
    std::shared_ptr<CodecMeter> meter, bool reshard_after_forward, const UnitLimits& limits,
    const std::shared_ptr<Offload>& optimizer_offload, const c10::intrusive_ptr<c10d::Store>& store) {
  ModelSource source{{}, device, order, [&take](int64_t unit) { return parameter_tensors(take(unit)); }};
  for (const auto& [name, parameters] : units) {
    UnitSource& unit = source.units.emplace_back(UnitSource{name, {}});
    for (const auto& [names, sizes, dtype, requires_grad, is_renormalized, is_encoded, split] : parameters) {
      unit.parameters.push_back({names, sizes, dtype, requires_grad, is_renormalized, is_encoded, split});
    }
  }
  ShardingOptions options;
  options.stage = kStages.at(stage);
  options.param_dtype = param_dtype;
  options.reduce_dtype = reduce_dtype;
  options.codecs = codec_table(codecs);
  options.residuals = std::move(residuals);
  options.weights = {.codec = weights_codec ? weights_codec->codec : nullptr, .meter = meter};
  options.meter = std::move(meter);
  options.reshard_after_forward = reshard_after_forward;
  options.limits = limits;
  options.optimizer_offload = optimizer_offload;
  options.store = store;
  return ShardedModule::create(source, groups, reduction_groups, options);
}

const char* name_of(EventLog::Kind kind) {
  constexpr const char* kNames[] = {"forward", "backward",        "gather",          "reduce",
                                    "step",    "wait for gather", "wait for reduce", "wait"};
  return kNames[static_cast<size_t>(kind)];
}

// ([(kind, unit, begin, end, bytes)], [(time, {class: bytes})]), times in nanoseconds of the steady clock.
py::tuple stop_log(ShardedModule& module) {
  module.communicator().log()->stop();
  py::list events;
  for (const EventLog::Event& event : module.communicator().log()->take_events()) {
    events.append(py::make_tuple(name_of(event.kind), event.unit, event.begin, event.end, event.bytes));
  }
  py::list samples;
  for (const EventLog::Sample& sample : module.communicator().log()->take_samples()) {
    samples.append(py::make_tuple(sample.time, sample.bytes));
  }
  return py::make_tuple(events, samples);
}

}  // namespace

void bind_sharding(py::module_& m) {
  py::class_<FlatGroup>(m, "FlatGroup", "The parameters of one unit that share a dtype, as one flat buffer.")
      .def_property_readonly(
          "master", [](const FlatGroup& self) { return defined_or_none(self.flat().master.values); },
          "None where the masters must be read from a tier: read_master serves both.")
      .def_property_readonly("master_dtype", [](const FlatGroup& self) { return self.flat().master_dtype(); })
      .def_property_readonly("master_numel", [](const FlatGroup& self) { return self.flat().master.numel; })
      .def_property_readonly("tiered_master", [](const FlatGroup& self) { return self.flat().master.tiered; })
      .def(
          "read_master",
          [](const FlatGroup& self, int64_t start, int64_t stop) { return self.flat().master.read(start, stop); },
          py::arg("start"), py::arg("stop"), ReleaseGil(),
          "Elements [start, stop) of the masters: a live view, or a copy on the CPU where they are in a tier.")
      .def(
          "write_master",
          [](const FlatGroup& self, int64_t start, const at::Tensor& values) {
            self.flat().master.write(start, values);
          },
          py::arg("start"), py::arg("values"), ReleaseGil())
      .def_property_readonly("parameter_out",
                             [](const FlatGroup& self) { return defined_or_none(self.flat().parameter_out); })
      .def_property_readonly("is_encoded", [](const FlatGroup& self) { return self.flat().is_encoded(); })
      .def_property_readonly("sends_differences", [](const FlatGroup& self) { return self.flat().sends_differences(); })
      .def_property_readonly("is_trainable", [](const FlatGroup& self) { return self.flat().is_trainable(); })
      .def_property_readonly("master_start", [](const FlatGroup& self) { return self.flat().master.start; })
      .def_property_readonly("shard_start", [](const FlatGroup& self) { return self.flat().shard_start(); })
      .def_property_readonly("shard_numel", [](const FlatGroup& self) { return self.flat().layout().shard_numel; })
      .def_property_readonly("total_numel", [](const FlatGroup& self) { return self.flat().layout().total_numel; })
      .def_property_readonly("unit_name", [](const FlatGroup& self) { return self.flat().unit_name(); })
      .def_property_readonly("segments", &FlatGroup::segments)
      .def_property_readonly("slots", &FlatGroup::slots)
      .def_property_readonly("local_shards", &FlatGroup::local_shards)
      .def("grad",
           [](const FlatGroup& self) {
             at::Tensor gradient;
             {
               const WithoutGil no_gil;  // after a backward that raised it waits for other ranks
               gradient = self.module->gradients().of(self.index);
             }
             return defined_or_none(gradient);
           })
      .def("has_grad",
           [](const FlatGroup& self, const at::Tensor& parameter) {
             return self.module->gradients().has(self.index, self.slot_of(parameter));
           })
      .def(
          "gather_master", [](const FlatGroup& self) { return self.module->masters().gather(self.index); },
          ReleaseGil())
      .def(
          "load",
          [](const FlatGroup& self, int64_t slot, const at::Tensor& value, int64_t start) {
            self.module->masters().load(self.index, slot, value, start);
          },
          py::arg("slot"), py::arg("value"), py::arg("start") = 0, ReleaseGil(),
          "Sets the masters that this rank updates of elements [start, start + value.numel()) of the flattened "
          "parameter; between begin_step and end_load of the core.");

  m.def("is_sharded", &is_sharded, py::arg("tensor"), "Whether the tensor is a parameter of a sharded model.");

  py::class_<RankGroups>(m, "RankGroups", "The ranks of one sharded model; with replicas, dimensions of a mesh.")
      .def(py::init<RankGroups::Group, RankGroups::Group, RankGroups::Group>(), py::arg("everybody"), py::arg("shards"),
           py::arg("replicas"))
      .def_readonly("everybody", &RankGroups::everybody)
      .def_readwrite("splits", &RankGroups::splits,
                     "By split, the groups that have the other parts of tensors; the first one has none.")
      .def_readwrite("parts", &RankGroups::parts, "All ranks that have some part; None where tensors are whole.")
      .def_readonly("shards", &RankGroups::shards, "The ranks that have one copy of the model together.")
      .def_readonly("replicas", &RankGroups::replicas, "The ranks that have the same slice; None with one copy.");

  py::class_<UnitLimits>(m, "UnitLimits", "How many elements may be whole beyond what runs, where units are gathered.")
      .def(py::init([](int64_t prefetch_numel, int64_t keep_numel, int64_t persistent_numel, int64_t max_whole_numel) {
             return UnitLimits{prefetch_numel, keep_numel, persistent_numel, max_whole_numel};
           }),
           py::kw_only(), py::arg("prefetch_numel") = UnitLimits().prefetch_numel,
           py::arg("keep_numel") = UnitLimits().keep_numel, py::arg("persistent_numel") = UnitLimits().persistent_numel,
           py::arg("max_whole_numel") = UnitLimits().max_whole_numel);

  py::class_<ShardedModule, std::shared_ptr<ShardedModule>>(m, "ShardedModule", "The core of a sharded model.")
      .def(py::init(&create), py::arg("units"), py::arg("device"), py::arg("order"), py::arg("take"), py::arg("groups"),
           py::arg("reduction_groups"), py::kw_only(), py::arg("stage"), py::arg("param_dtype"),
           py::arg("reduce_dtype"), py::arg("codecs"), py::arg("residuals"), py::arg("weights_codec"), py::arg("meter"),
           py::arg("reshard_after_forward"), py::arg("limits") = UnitLimits(),
           py::arg("optimizer_offload") = py::none(), py::arg("store") = py::none(), ReleaseGil())
      .def(
          "pre_forward",
          [](ShardedModule& self, int64_t unit, const std::vector<at::Tensor>& inputs, bool has_other_inputs) {
            return self.forward().pre_forward(unit, inputs, has_other_inputs);
          },
          py::arg("unit"), py::arg("inputs"), py::arg("has_other_inputs") = false, ReleaseGil())
      .def(
          "post_forward",
          [](ShardedModule& self, int64_t unit, const std::vector<at::Tensor>& outputs) {
            self.forward().post_forward(unit, outputs);
          },
          ReleaseGil())
      .def(
          "abandon_forward", [](ShardedModule& self, int64_t unit) { self.forward().abandon_forward(unit); },
          ReleaseGil())
      .def("set_synchronize",
           [](ShardedModule& self, bool synchronize) { self.backward().set_synchronize(synchronize); })
      .def_property_readonly("synchronizes", [](ShardedModule& self) { return self.backward().synchronizes(); })
      .def(
          "reduce_accumulated", [](ShardedModule& self) { self.backward().reduce_accumulated(); }, ReleaseGil(),
          "Reduces what backwards have left that did not synchronize; collective.")
      .def_property("averages_gradients", &ShardedModule::averages_gradients, &ShardedModule::set_averages_gradients)
      .def(
          "set_codecs",
          [](ShardedModule& self, const std::vector<PyCodecRow>& codecs) { self.set_codecs(codec_table(codecs)); },
          py::arg("codecs"), ReleaseGil(),
          "Of gradients, from the next backward on: [(numel of the least reduction, Compressor or None for as they "
          "are, "
          "has_error_feedback)], ascending; the same on every rank.")
      .def_property_readonly(
          "is_compressed", [](const ShardedModule& self) { return !self.options().codecs.is_empty(); },
          "Whether gradients have codecs, or may get some.")
      .def(
          "settle_writes",
          [](ShardedModule& self, const std::string& operation) { self.settle_writes(operation.c_str()); },
          py::arg("operation"), ReleaseGil())
      .def(
          "refresh_own_masters",
          [](ShardedModule& self) {
            self.state_offload().check(StateOffload::kParameters | StateOffload::kMasters, "local_shards");
            self.masters().refresh_own();
          },
          ReleaseGil())
      .def(
          "offload_states",
          [](ShardedModule& self, const std::vector<std::string>& states, bool moves, bool pin_memory,
             bool non_blocking) {
            uint32_t bits = 0;
            for (const std::string& state : states) bits |= StateOffload::named(state);
            constexpr uint32_t kSettled = StateOffload::kParameters | StateOffload::kMasters;
            if ((self.state_offload().away() & kSettled) == 0) {  // what is written in between is settled after reload
              self.settle_writes("offload_states");
            }
            self.state_offload().offload(bits, moves, pin_memory, non_blocking);
          },
          py::arg("states"), py::kw_only(), py::arg("moves"), py::arg("pin_memory"), py::arg("non_blocking"),
          ReleaseGil(), "See sharding/module/state_offload.h; collective.")
      .def(
          "reload_states", [](ShardedModule& self, bool non_blocking) { self.state_offload().reload(non_blocking); },
          py::arg("non_blocking"), ReleaseGil())
      .def(
          "check_loaded",
          [](ShardedModule& self, const std::string& operation) {
            self.state_offload().check(StateOffload::kAll, operation.c_str());
          },
          py::arg("operation"), "RuntimeError where something is offloaded.")
      .def("read_only_shard", &ShardedModule::read_only_shard, py::arg("shard"), py::arg("message"))
      .def(
          "publish_shards", [](ShardedModule& self) { self.masters().publish(); }, ReleaseGil())
      .def("unshard_all", &ShardedModule::unshard_all, ReleaseGil())
      .def("reshard_all", &ShardedModule::reshard_all, ReleaseGil())
      .def_property_readonly("full_depth", [](const ShardedModule& self) { return self.whole_units().full_depth(); })
      .def("begin_step", &ShardedModule::begin_step, py::arg("options") = OptionDigests{0, 0}, ReleaseGil(),
           "options: two digests of what the step goes by in its param groups, rounded at other places, not 0: "
           "RuntimeError on every rank where both differ.")
      .def("end_step", &ShardedModule::end_step, py::arg("overlaps") = false, ReleaseGil())
      .def("join_step", &ShardedModule::join_step, ReleaseGil(),
           "Waits for what end_step(overlaps=True) has left on its way; does not communicate.")
      .def("end_load", &ShardedModule::end_load, py::arg("replaces_all") = false, ReleaseGil(),
           "Instead of end_step: publishes masters as they are. False, on every rank, where replicas had others. "
           "replaces_all: no parameter is what it was, and backwards refuse graphs of before.")
      .def(
          "zero_gradients", [](ShardedModule& self) { self.gradients().zero(); }, ReleaseGil())
      .def(
          "will_accumulate", [](ShardedModule& self) { return self.gradients().will_accumulate(); },
          "In a hook: whether the autograd task that runs accumulates gradients; torch.autograd.grad does not.")
      .def(
          "scale_gradients", [](ShardedModule& self, double factor) { self.gradients().scale(factor); }, ReleaseGil())
      .def(
          "scale_gradients_of",
          [](ShardedModule& self, const std::vector<at::Tensor>& parameters, double factor) {
            self.gradients().scale(factor, &parameters);
          },
          py::arg("parameters"), py::arg("factor"), ReleaseGil(), "Those alone.")
      .def(
          "show_full_gradients", [](ShardedModule& self) { self.gradients().show_full(); }, ReleaseGil())
      .def(
          "hide_full_gradients", [](ShardedModule& self) { self.gradients().hide_full(); }, ReleaseGil())
      .def("dissolve", &ShardedModule::dissolve, ReleaseGil())
      .def(
          "clip_grad_norm",
          [](ShardedModule& self, double max_norm, double norm_type, bool error_if_nonfinite) {
            return self.gradients().clip_norm(max_norm, norm_type, error_if_nonfinite);
          },
          ReleaseGil())
      .def("communication_seconds", &ShardedModule::communication_seconds)
      .def("memory_report", &ShardedModule::memory_report)
      .def_property_readonly(
          "steps", [](const ShardedModule& self) { return self.communicator().log()->steps(); },
          "How many optimizer steps have ended.")
      .def("start_log", [](ShardedModule& self) { self.communicator().log()->start(); })
      .def("stop_log", &stop_log, "What was done since start_log, and what memory held.")
      .def("changed_parameters", &ShardedModule::changed_parameters, ReleaseGil())
      .def_property_readonly("optimizer_offload",
                             [](const ShardedModule& self) { return self.options().optimizer_offload; })
      .def_property_readonly("stage", [](const ShardedModule& self) { return self.options().stage.number; })
      .def_property_readonly("rank", [](const ShardedModule& self) { return self.communicator().rank(); })
      .def_property_readonly("world_size", [](const ShardedModule& self) { return self.communicator().world_size(); })
      .def_property_readonly(
          "process_group", [](const ShardedModule& self) { return self.communicator().groups().everybody; },
          "Of every rank of the model.")
      .def_property_readonly("shard", [](const ShardedModule& self) { return self.communicator().shard(); })
      .def_property_readonly("shards", [](const ShardedModule& self) { return self.communicator().shards(); })
      .def_property_readonly(
          "shard_group", [](const ShardedModule& self) { return self.communicator().groups().shards; },
          "Of the ranks that have one copy of the model together; this rank is `shard` of `shards` in it.")
      .def_property_readonly(
          "replica", [](const ShardedModule& self) { return self.communicator().replica(); },
          "Which copy of the model this rank has a part of, among `replicas`.")
      .def_property_readonly("replicas", [](const ShardedModule& self) { return self.communicator().replicas(); })
      .def_property_readonly("fetch_name", [](const ShardedModule& self) { return self.whole_units().fetch().name(); })
      .def_property_readonly(
          "fetch_is_collective", [](const ShardedModule& self) { return self.whole_units().fetch().is_collective(); },
          "Whether ranks communicate to make a unit whole.")
      .def_property_readonly(
          "first_item", [](const ShardedModule& self) { return self.whole_units().fetch().first_item(); },
          "Errors name what ranks gather by numbers: this model's come behind this one.")
      .def_property_readonly("residuals", [](const ShardedModule& self) { return self.options().residuals; })
      .def_property_readonly("flat_groups", [](const std::shared_ptr<ShardedModule>& self) {
        std::vector<FlatGroup> groups;
        for (size_t i = 0; i < self->units().flats().size(); ++i) {
          groups.push_back({self, static_cast<int64_t>(i)});
        }
        return groups;
      });
}

}  // namespace zeropg

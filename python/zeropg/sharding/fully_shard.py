"""`fully_shard`: turns a model into a sharded one, in place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from typing import Any, Literal, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeropg._native import _C
from zeropg.compression.auto import plan_of_auto
from zeropg.compression.codec import Codec
from zeropg.compression.plan import Plan, check_plan, say_what_is_not_encoded
from zeropg.compression.state import backend_of
from zeropg.rank_io.agreement import together
from zeropg.sharding.inner_calls import absorb_inner_calls, asked_of, check_inner_calls, inner_units
from zeropg.sharding.limits import limits_of, what_has_no_effect
from zeropg.sharding.load_state_dict import load_into
from zeropg.sharding.materialize import Materializer
from zeropg.sharding.model_codecs import ModelCodecs, make_codecs
from zeropg.sharding.offload import check_offload_params, human_bytes, leaves_memory, offload_of, open_offload
from zeropg.sharding.rank_groups import check_mesh, described, groups_of, reduction_groups, store_of
from zeropg.sharding.running_statistics import refuse_mixed_statistics
from zeropg.sharding.shared_memory import check_shared_memory
from zeropg.sharding.state import ShardedState
from zeropg.sharding.subclass import subclass_of
from zeropg.sharding.trace import requested_trace
from zeropg.sharding.units import UnitChoice, UnitPlan, plan_units, renormalized_parameters

_STAGES = (0, 1, 2, 3)
_LARGE_ROOT_BYTES = 16 << 20


class FullyShardedModule(nn.Module):
    """Mixed into the class of a sharded model and of its units; `isinstance(model, zeropg.FullyShardedModule)`."""

    _zeropg_state: ShardedState
    _zeropg: _C.ShardedModule
    _zeropg_unit: tuple[ShardedState, int]  # and its number among the units

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = vars(self).get("_zeropg_unit")
        if unit is None:
            return super().__call__(*args, **kwargs)
        state, index = unit
        return state.run(index, super().__call__, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's; `set_to_none=False` zeroes the accumulated gradients, sharded or not."""
        state = getattr(self, "_zeropg_state", None)
        if set_to_none:
            super().zero_grad(set_to_none=True)
        elif state is None:  # a unit, whose model has other gradients too
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad.dtype)
        else:
            state.check_outside_full_gradients("zero_grad(set_to_none=False)")
            state.core.zero_gradients()
            for parameter in state.ignored_parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's. Waits for weights that a step with overlap_step=True has left on their way; sends nothing.

        With Plan(weights=...) in stages 1 and 2 these are the replicas that the model computes with, and a warning
        says so once; zeropg.full_state_dict has the masters.
        """
        unit = vars(self).get("_zeropg_unit")
        if unit is not None:
            unit[0].core.join_step()
            if not kwargs.get("keep_vars"):
                unit[0].warn_of_replicas()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Sets parameters and buffers from whole tensors, in every stage, as nn.Module's does. All ranks must call.

        Masters take the values in the dictionary's own precision. Raises NotImplementedError with assign=True, and on a
        unit of a sharded model.
        """
        if assign:
            raise NotImplementedError(
                "[zeropg] load_state_dict(assign=True) would replace sharded parameters; use assign=False."
            )
        if not hasattr(self, "_zeropg_state"):
            raise NotImplementedError(
                "[zeropg] load_state_dict on a unit of a sharded model; call it on the model, or "
                "zeropg.load_full_state_dict."
            )
        return load_into(self, state_dict, strict, super().load_state_dict)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "[zeropg] a sharded model cannot be copied: its memory is shared between ranks. Build a second model and "
            "load zeropg.full_state_dict(model) into it, or copy before fully_shard; for averages of weights, as of "
            "torch.optim.swa_utils, use zeropg.ema(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "[zeropg] a sharded model cannot be pickled. Save zeropg.full_state_dict(model), or export with "
            "zeropg.save_16bit_weights(model, directory)."
        )


def fully_shard(
    module: nn.Module,
    *,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    units: Iterable[UnitChoice] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    offload_params: Any = None,
    offload_optimizer: Any = None,
    compression: Codec | Plan | Literal["auto"] | None = None,
    reshard_after_forward: bool = True,
    prefetch_numel: int = 1,
    keep_numel: int = 0,
    persistent_numel: int = 0,
    max_whole_numel: int | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shards a module over the ranks of a process group, in place. All ranks must call.

    Afterwards the module is trained as before, with its optimizer from `zeropg.shard_optimizer`. Parameters keep
    identity, names and shapes. All ranks get the values of rank 0.

    No rank need have memory for the whole model: units of a model on the `meta` device get memory and their modules'
    own initial values one after the other, and are sharded at once.

    On a mesh of two dimensions (hybrid sharding, as FSDP2's) each row of ranks shards a copy of the model, and
    gradients are averaged over all ranks. With a row per node, parameters stay inside nodes, and only slices of
    gradients travel between them:

        mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
        model = zeropg.fully_shard(model, mesh=mesh)

    Args:
        module: the model. A submodule on which `fully_shard` was called before becomes a unit of the model, whose
            options hold for all of it: what that call asked for must be the same here.
        stage: what is sharded. 0: nothing (as DDP); 1: masters and optimizer state; 2: gradients too; 3: parameters
            too.
        mesh: the group to shard over as a one-dimensional DeviceMesh; or one of two dimensions: the first replicates,
            the second shards. In it ranks ascend, as init_device_mesh makes it; it may be a part of the world; or
        process_group: as a group of any backend. Default: the world.
        units: what is made whole together: submodules, their names or classes. Default: the children of every
            nn.ModuleList, repeated blocks in nn.Sequential and nn.ModuleDict, and children of nn.Sequential with a
            million elements or more. All other parameters belong to the root.
        ignored_params: parameters that are left alone, neither sharded nor reduced.
        param_dtype: dtype of computation, seen in `p.dtype`; default: each parameter's own. 16-bit parameters have fp32
            masters, which steps update and checkpoints save. Floating inputs of the model are cast to it. Batch norms
            with running statistics need buffer_dtype too.
        reduce_dtype: dtype of gradients between ranks; default: the masters' (fp32, or fp64).
        buffer_dtype: dtype to which floating buffers are cast; default: they stay as they are.
        offload_optimizer: where optimizer state, and masters that are apart from the parameters, are kept between
            steps: "cpu" (host memory; on a CPU model nothing changes), a directory on a local disk, or a
            `zeropg.Offload`. Where the parameter is the master (fp32 without param_dtype), only the state goes there.
            Losses stay the same to the bit. A disk serves what has a fused kernel: Adagrad, Adam, AdamW, Lion, SGD.
        offload_params: "cpu" is accepted on a CPU model, where it changes nothing; nothing else is available.
        compression: a `zeropg.compression.Plan`, or a codec for gradients such as `zeropg.compression.BlockQuant(4)`,
            or "auto", which measures what pays on this link (bf16, 8 or 4 bits, or nothing), for each size of
            reduction, and again every 25 steps where reductions became slower or faster; it says what it chose;
            default: nothing is encoded. It needs fp32 masters, a group of zeropg and tensors on the CPU. With error
            feedback each rank keeps up to 4 bytes per parameter more. With weights= of a plan masters are apart from
            fp32 parameters too in stages 1 and 2: 4 bytes per parameter / ranks. Where a mesh replicates, gradients
            are encoded between replicas in stages 2 and 3, and weights= is not available.
        reshard_after_forward: stage 3: False keeps every unit whole from its forward to its backward, which takes
            memory and saves time.
        prefetch_numel: stage 3, where units are gathered (several nodes, other backends; elsewhere this and the three
            limits that follow change nothing): the next unit is gathered behind the one that runs, and more as long as
            they have no more elements together, in the order of earlier steps. 0: none.
        keep_numel: there, how much of what a forward has gathered stays whole for the backward, and is not gathered
            again: its last units, as long as they have no more elements together, but none that has more by itself.
            They stay in the node's one copy where there is one, which takes room in the pool of the node's first rank
            (`BackendOptions(pool_bytes=)`). 0: none, and each unit is gathered twice in a step.
        persistent_numel: there, units of at most so many elements stay whole from their first use after a step to the
            next step, through all forwards and backwards between; what reads or loads the whole model, as checkpoints
            do, ends it sooner. It is a unit that persists or not, as a whole: to have norms or biases persist, name
            their modules in `units`. 0: none.
        max_whole_numel: there, how many elements may be whole, or on their way, at once. Units that run, the root,
            and those of which a backward still expects gradients are always whole; what is gathered ahead has room
            beside them, then what is kept, and units persist in the order of the model while they fit beside the root.
            None: no limit.
        device: where parameters and buffers on `meta` get memory. Default: where the others are, or the group's device.

    Returns:
        The same module. Its class becomes a subclass of both its own class and `zeropg.FullyShardedModule`.

    Raises:
        TypeError: `module` is no module, mesh no DeviceMesh, or a dtype is not floating.
        ValueError: the module has no parameters or is sharded already, nothing initialises what is on `meta`, the
            device is not that of other parameters, the stage is not 0 to 3, a number of elements is none or contradicts
            reshard_after_forward, both mesh and process_group are given, the mesh has more than two dimensions, another
            device or not this rank, models, meshes or arguments differ between ranks, or compression cannot serve the
            model.
        OSError: on every rank, where one cannot use or fill its offload directory.
        NotImplementedError: an argument or a kind of parameter is not available.
    """
    groups = groups_of(mesh, process_group)
    group = groups.everybody
    with _failing_together(group):
        _check(module, stage, param_dtype, reduce_dtype, buffer_dtype)
        limits = limits_of(reshard_after_forward, prefetch_numel, keep_numel, persistent_numel, max_whole_numel)
        requested_trace()
        offload = offload_of(offload_optimizer, "offload_optimizer")
        plan = None if compression is None else _plan_of(compression, group)
        options = {
            "mesh": described(groups, mesh),
            "stage": stage,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "buffer_dtype": buffer_dtype,
            "compression": compression if isinstance(compression, str) else plan and repr(plan),
            "reshard_after_forward": reshard_after_forward,
            "prefetch_numel": prefetch_numel,
            "keep_numel": keep_numel,
            "persistent_numel": persistent_numel,
            "max_whole_numel": max_whole_numel,
            "offload_optimizer": offload and offload.device,  # each rank may have a disk of its own
        }
        ignored = list(ignored_params or ())
        asked = asked_of(options, _defaults(mesh, process_group), ignored)
        check_inner_calls(module, options, asked.ignored)
        absorb_inner_calls(module)
        place = _device_of(module, device, group)
        check_mesh(mesh, place)
        check_offload_params(offload_params, place)
        plans = plan_units(module, inner_units(module) if units is None else units, ignored)
        _check_parameters(module, plans)
        values = Materializer(module, place)
        check_shared_memory(module, plans)
        if plan is not None:
            _check_compression(plan, plans, reduce_dtype, place, group)
            _check_encoded_weights(
                plan, stage, offload is not None and leaves_memory(offload, place), groups.replicas is not None
            )
    _check_same_on_all_ranks(module, plans, options, group)
    tier = open_offload(offload, place, group)
    if tier is not None and group.rank() == 0:
        print(_offload_plan(tier, plans, stage, param_dtype, groups.shards.size()), file=sys.stderr)
    renormalized = renormalized_parameters(module)
    reductions = reduction_groups(groups, stage, place)
    codecs = make_codecs(plan, compression == "auto", group, reductions)
    weights = None if plan is None else plan.weights
    encoded = set() if plan is None else _encoded_parameters(plan, plans)

    def take(index: int) -> list[nn.Parameter]:
        values.complete(index)
        return [parameter for _, parameter in plans[index].parameters]

    core = _C.ShardedModule(
        [
            (
                unit.name,
                [
                    (names, list(p.shape), p.dtype, p.requires_grad, id(p) in renormalized, id(p) in encoded)
                    for names, p in unit.parameters
                ],
            )
            for unit in plans
        ],
        place,
        values.order(plans),
        take,
        groups,
        reductions,
        stage=stage,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        codecs=[] if codecs is None else codecs.rows(),
        residuals=None if codecs is None else codecs.coding.residuals,
        weights_codec=None if weights is None else weights.make_compressor(),
        meter=None if codecs is None else codecs.coding.meter,
        reshard_after_forward=reshard_after_forward,
        limits=limits,
        optimizer_offload=tier,
        store=store_of(groups, reductions),
    )
    together(group, "fully_shard", values.finish)
    _prepare_buffers(module, buffer_dtype, group)
    if param_dtype is not None:
        refuse_mixed_statistics(module, {id(p) for unit in plans for _, p in unit.parameters}, param_dtype)
    if codecs is not None:
        codecs.coding.exposed_seconds = core.communication_seconds
    vars(module).update(
        _zeropg_asked=asked, _zeropg=core, _zeropg_state=ShardedState(module, core, plans, param_dtype, codecs=codecs)
    )
    for unit in plans:
        vars(unit.module)["_zeropg_is_unit"] = True
        _swap_class(unit.module)
    if core.rank == 0:
        unused = what_has_no_effect(
            core, keep_numel=keep_numel, persistent_numel=persistent_numel, max_whole_numel=max_whole_numel
        )
        print(_summary(core, plans, reduce_dtype, plan, codecs) + unused, file=sys.stderr)
        if plan is not None:
            say_what_is_not_encoded(
                plan,
                ((_plain_name(plan, names, p) or names[0], p) for unit in plans for names, p in unit.parameters),
                how="auto" if compression == "auto" else str(plan),
            )
        if units is None and core.fetch_name.startswith("gathered"):  # also with one rank: what is whole is a copy
            _say_what_the_root_holds(plans)
    return module


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method other than `forward` be called on a sharded model or one of its units, after `fully_shard`.

    Parameters are whole while the method runs, as in a call of the module. Registering does not communicate; all ranks
    should register the same methods.

    Raises:
        ValueError: the module is neither sharded nor a unit, or has no such method.
    """
    if "_zeropg_unit" not in vars(module):
        raise ValueError(
            f"[zeropg] register_forward_method: this {type(module).__name__} is neither a sharded model nor a unit of "
            "one; call zeropg.fully_shard first, and name the module in units."
        )
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"[zeropg] register_forward_method: {type(module).__name__} has no method {method_name!r}.")

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        state, index = vars(module)["_zeropg_unit"]
        return state.run(index, method, args, kwargs)

    setattr(module, method_name, run)


def _check(module: nn.Module, stage: int, *dtypes: torch.dtype | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"[zeropg] fully_shard: expected a torch.nn.Module, got {type(module).__name__}.")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"[zeropg] fully_shard: a {type(module).__name__} has no forward, so nothing would make its parameters "
            "whole; shard the model that contains it, or its children one by one."
        )
    if getattr(module, "_zeropg_state", None) is not None:
        raise ValueError(f"[zeropg] fully_shard: this {type(module).__name__} is sharded already; call it once.")
    if stage not in _STAGES:
        raise ValueError(f"[zeropg] fully_shard: stage is {stage!r}; expected 0, 1, 2 or 3.")
    for dtype in dtypes:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"[zeropg] fully_shard: got dtype {dtype!r}; expected a floating dtype such as torch.bfloat16."
            )
    lazy = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"[zeropg] fully_shard: {', '.join(map(repr, lazy))} of a lazy module have no shape yet; expected them to "
            "have one: run a forward on a small batch first."
        )


def _defaults(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Of the options that ranks compare. Ranks are no default where a caller has said which."""
    defaults = {name: each.default for name, each in inspect.signature(fully_shard).parameters.items()}
    if mesh is None and group is None:
        defaults["mesh"] = described(groups_of(None, None), None)
    else:
        del defaults["mesh"]
    return defaults


def _device_of(module: nn.Module, device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    """Where all parameters are or, if they are on `meta`, will be."""
    there = next((p.device for p in module.parameters() if not p.is_meta), None)
    if device is None:
        return there or _default_device(group)
    chosen = torch.empty(0, device=device).device  # with its index
    if chosen.type == "meta" or there not in (None, chosen):
        raise ValueError(
            f"[zeropg] fully_shard: device is {str(device)!r}; expected "
            + ("a device that has memory." if there is None else f"{str(there)!r}, where the model has parameters.")
            + " It says where parameters on `meta` get memory; leave it out for the others."
        )
    return chosen


def _default_device(group: dist.ProcessGroup) -> torch.device:
    devices = [device.type for device in group._device_types]
    if "cuda" in devices and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_parameters(module: nn.Module, plans: list[UnitPlan]) -> None:
    if not any(plan.parameters for plan in plans):
        raise ValueError(
            f"[zeropg] fully_shard: the {type(module).__name__} has no parameters to shard; expected at least one "
            "(ignored_params do not count)."
        )
    devices: dict[torch.device, str] = {}
    for plan in plans:
        for names, parameter in plan.parameters:
            if not parameter.is_meta:
                devices.setdefault(parameter.device, names[0])
            if len(devices) > 1:
                raise ValueError(
                    "[zeropg] fully_shard: parameters are on several devices: "
                    f"{', '.join(f'{name!r} on {device}' for device, name in devices.items())}; expected one device "
                    "per rank. Move the model there first (model.to(device)), or name the others in ignored_params."
                )
            if _C.is_sharded(parameter):
                raise ValueError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} belongs to a sharded model already; shard a "
                    "submodule before the model that contains it, and each model once."
                )
            if is_traceable_wrapper_subclass(parameter):
                raise NotImplementedError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} is a {type(parameter).__name__}, expected a plain "
                    "tensor: what tensor parallelism or quantization has wrapped cannot be sharded here. Instead of "
                    "torchao's quantize_, zeropg.quantize_frozen(model) packs frozen weights into 4 or 8 bits that are "
                    "sharded. Name others in ignored_params, or use torch's FSDP2, which shards DTensors and runs over "
                    "zeropg's groups."
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise NotImplementedError(
                    f"[zeropg] fully_shard: parameter {names[0]!r} is complex; train its real view "
                    "(torch.view_as_real), freeze it, or name it in ignored_params."
                )


@contextmanager
def _failing_together(group: dist.ProcessGroup) -> Iterator[None]:
    """What this rank raises in here, the others raise where they compare their models, instead of waiting for it."""
    try:
        yield
    except Exception as error:
        if group.size() > 1:
            with suppress(Exception):  # the first error says more
                _exchange(f"{type(error).__name__}: {error}", group)
        raise


def _exchange(mine: list[str] | str, group: dist.ProcessGroup) -> list[Any]:
    everybodys: list[Any] = [None] * group.size()
    dist.all_gather_object(everybodys, mine, group=group)
    return everybodys


def _plan_of(compression: Any, group: dist.ProcessGroup) -> Plan | None:
    """What may travel encoded."""
    if not isinstance(compression, str):
        return check_plan(compression, "fully_shard")
    if compression != "auto":
        raise TypeError(
            f'[zeropg] fully_shard: compression is {compression!r}; expected "auto", a codec such as '
            "zeropg.compression.BlockQuant(4), or a Plan."
        )
    return plan_of_auto(backend_of(group, "fully_shard"))


def _check_compression(
    plan: Plan,
    plans: list[UnitPlan],
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    backend_of(group, "fully_shard")
    if plan.gradients is not None and reduce_dtype not in (None, torch.float32):
        raise ValueError(
            f"[zeropg] fully_shard: reduce_dtype is {reduce_dtype}, but compression encodes fp32 gradients; leave "
            "reduce_dtype as it is."
        )
    for unit in plans:
        for names, parameter in unit.parameters:
            if parameter.requires_grad and (parameter.dtype == torch.float64 or device.type != "cpu"):
                raise ValueError(
                    f"[zeropg] fully_shard: {names[0]!r} ({parameter.dtype} on {device}) cannot be "
                    "compressed; expected fp32 masters on the CPU. Shard without compression."
                )


def _check_encoded_weights(plan: Plan, stage: int, offloads_masters: bool, has_replicas: bool) -> None:
    if plan.weights is None:
        return
    if has_replicas:
        raise NotImplementedError(
            "[zeropg] fully_shard: weights= of the plan is not available on a mesh that replicates; leave it out. "
            "Weights travel inside a copy of the model alone, and gradients= serves what travels between the copies."
        )
    if stage == 0:
        raise ValueError(
            "[zeropg] fully_shard: the plan has a codec for weights, but in stage 0 no weights travel, since every "
            "rank updates all of them. Leave weights= out, or use stage 1, 2 or 3."
        )
    if stage < 3 and offloads_masters:
        raise ValueError(
            "[zeropg] fully_shard: weights= of the plan sends differences from the masters, which offload_optimizer "
            "keeps on a disk; expected them in memory. Leave one of the two out, or use stage 3."
        )


def _encoded_parameters(plan: Plan, units: list[UnitPlan]) -> set[int]:
    """Ids of the parameters that travel encoded."""
    return {id(p) for unit in units for names, p in unit.parameters if _plain_name(plan, names, p) is None}


def _plain_name(plan: Plan, names: list[str], parameter: nn.Parameter) -> str | None:
    """The name under which the plan leaves a parameter as it is; None for one that travels encoded."""
    return next((name for name in names if not plan.encodes(name, parameter)), None)


def _check_same_on_all_ranks(
    module: nn.Module, plans: list[UnitPlan], options: dict[str, Any], group: dist.ProcessGroup
) -> None:
    """Ranks with different models would read each other's memory wrongly; say so before anything is shared."""
    if group.size() == 1:
        return
    mine = [f"{key}={value}" for key, value in options.items()]
    for plan in plans:
        for names, parameter in plan.parameters:
            mine.append(f"{_describe(names[0], parameter)}, names {names}, in unit {plan.name!r}")
    mine += [f"buffer {_describe(name, buffer)}" for name, buffer in module.named_buffers()]
    everybodys = _exchange(mine, group)
    for rank, theirs in enumerate(everybodys):
        if isinstance(theirs, str):
            raise ValueError(
                f"[zeropg rank {group.rank()}/{group.size()}] fully_shard: rank {rank} raised {theirs}; expected every "
                "rank to pass a model that can be sharded."
            )
    for rank, theirs in enumerate(everybodys):
        for a, b in zip_longest(theirs, everybodys[0], fillvalue="nothing more"):
            if a != b:
                raise ValueError(
                    f"[zeropg rank {group.rank()}/{group.size()}] fully_shard: rank {rank} has {a} where rank 0 "
                    f"has {b}; expected the same arguments, units, parameters and buffers on every rank."
                )


def _describe(name: str, tensor: torch.Tensor) -> str:
    kind = "trainable" if tensor.requires_grad else "not trainable"
    kind += "" if tensor.layout == torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return f"{name!r} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {kind}"


def _prepare_buffers(module: nn.Module, buffer_dtype: torch.dtype | None, group: dist.ProcessGroup) -> None:
    """Casts floating buffers and gives all the values of rank 0; one with several names stays one."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old one is kept, so that its id is not used again
    for child in module.modules():
        for key, buffer in child._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in done:
                dtype = buffer_dtype if buffer_dtype is not None and buffer.is_floating_point() else buffer.dtype
                prepared = buffer.to(dtype)
                if group.size() > 1 and prepared.layout != torch.strided:  # a sparse one, such as a graph's edges
                    from_rank_0 = [prepared]
                    dist.broadcast_object_list(from_rank_0, group=group, group_src=0)
                    prepared = from_rank_0[0].to(prepared.device)
                elif group.size() > 1:
                    prepared = prepared.contiguous()  # itself, but for a transposed or expanded one
                    # As bytes: not every backend knows every dtype.
                    dist.broadcast(prepared.view(-1).view(torch.uint8), group_src=0, group=group)
                done[id(buffer)] = (buffer, prepared)
            child._buffers[key] = done[id(buffer)][1]


# By the user's class: torch.compile makes code for a class, and blocks of one class are to share it. A class of ours is
# kept by its modules alone, and goes with the last of them; the user's then goes as if it had never been sharded.
_SHARDED_CLASSES: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()


def _swap_class(module: nn.Module) -> None:
    cls = type(module)
    if not issubclass(cls, FullyShardedModule):
        module.__class__ = _SHARDED_CLASSES.get(cls) or _SHARDED_CLASSES.setdefault(
            cls, subclass_of(cls, FullyShardedModule)
        )


def _summary(
    core: _C.ShardedModule,
    plans: list[Any],
    reduce_dtype: torch.dtype | None,
    compression: Plan | None,
    codecs: ModelCodecs | None,
) -> str:
    """One line with every setting that changes numbers."""
    count = sum(parameter.numel() for plan in plans for _, parameter in plan.parameters)
    computed = {parameter.dtype for plan in plans for _, parameter in plan.parameters}
    masters = {group.master_dtype for group in core.flat_groups if group.is_trainable}
    codec = codecs and codecs.describe_gradients()
    return (
        f"[zeropg] stage {core.stage} over {_ranks(core)}: {count:,} parameters in {len(plans)} units, "
        f"computed in {_names(computed)}, masters in {_names(masters)}, gradients averaged in "
        f"{_names({reduce_dtype} if reduce_dtype else masters)}{'' if codec is None else f' as {codec}'}; "
        f"parameters {core.fetch_name}{_encoded_weights(core, compression)}"
    )


def _ranks(core: _C.ShardedModule) -> str:
    if core.replicas == 1:
        return f"{core.world_size} ranks"
    return f"{core.world_size} ranks ({core.replicas} replicas of {core.shards} shards)"


def _encoded_weights(core: _C.ShardedModule, plan: Plan | None) -> str:
    if plan is None or plan.weights is None:
        return ""
    codec = plan.weights.make_compressor().description
    if any(group.sends_differences for group in core.flat_groups):
        apart = human_bytes(core.memory_report()["masters"])
        return f", updates as differences in {codec}, for which masters apart from them take {apart} per rank"
    if core.fetch_is_collective:
        return f" as {codec}"
    return f"; weights as {codec} changes nothing, since no weights travel"


def _say_what_the_root_holds(plans: list[UnitPlan]) -> None:
    *others, root = (sum(p.nbytes for _, p in plan.parameters) for plan in plans)
    if root > _LARGE_ROOT_BYTES and root > sum(others):
        print(
            f"[zeropg] stage 3: the root holds {human_bytes(root)} of {human_bytes(root + sum(others))}, which every "
            "rank has whole from a forward to the end of its backward, since they are in no block of an nn.ModuleList, "
            "nn.Sequential or nn.ModuleDict. Name modules that run one after the other in units=[...]: then one of "
            "them is whole at a time.",
            file=sys.stderr,
        )


def _offload_plan(
    tier: _C.Offload, plans: list[UnitPlan], stage: int, param_dtype: torch.dtype | None, world_size: int
) -> str:
    """One line, before anything is allocated."""
    apart = 0
    for plan in plans:
        for _, parameter in plan.parameters:
            master = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            if parameter.is_floating_point() and (param_dtype or parameter.dtype) != master:
                apart += parameter.numel() * master.itemsize
    share = apart // (world_size if stage >= 1 else 1)
    masters = f"about {human_bytes(share)} of masters per rank" if share else "no masters: parameters are their own"
    buffers = human_bytes(tier.buffer_bytes)
    return f"[zeropg] offload_optimizer: {masters}, to {tier.describe()}; steps pass through {buffers} of buffers"


def _names(dtypes: set[torch.dtype]) -> str:
    return "/".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"

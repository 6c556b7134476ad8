"""`fully_shard`: turns a model into a sharded one, in place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropg._native import _C
from zeropg.compression.codec import Codec
from zeropg.compression.plan import Plan, say_what_is_not_encoded
from zeropg.rank_io.agreement import together
from zeropg.sharding.arguments import (
    check_chooses_for_all,
    check_compression,
    check_encoded_weights,
    check_module,
    check_parameters,
    device_of,
    encoded_parameters,
    plain_name,
    plan_of,
)
from zeropg.sharding.buffers import prepare_buffers
from zeropg.sharding.inner_calls import absorb_inner_calls, asked_of, check_inner_calls, inner_units
from zeropg.sharding.limits import limits_of, what_has_no_effect
from zeropg.sharding.materialize import Materializer
from zeropg.sharding.model_codecs import make_codecs
from zeropg.sharding.offload import check_offload_params, leaves_memory, offload_of, open_offload
from zeropg.sharding.rank_groups import check_mesh, described, groups_of, reduction_groups, store_of
from zeropg.sharding.running_statistics import refuse_mixed_statistics
from zeropg.sharding.same_models import check_same_on_all_ranks, failing_together
from zeropg.sharding.sharded_class import swap_class
from zeropg.sharding.shared_memory import KeptViews, check_shared_memory
from zeropg.sharding.state import ShardedState
from zeropg.sharding.summary import offload_plan, say_what_the_root_holds, summary
from zeropg.sharding.trace import requested_trace
from zeropg.sharding.units import UnitChoice, plan_units, renormalized_parameters
from zeropg.tensor_parallel.distributed import local_of
from zeropg.tensor_parallel.groups import tensor_parallel
from zeropg.tensor_parallel.taken import random_numbers_of_parts, taken


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

    Beside tensor parallelism pass the other dimension of the mesh. Parameters that are DTensors stay DTensors, and so
    do their gradients; each rank shards the part that it has of them. Norms and checkpoints count a tensor once. Plain
    parameters of such a model, which several ranks compute with, have to get the same gradients on them:

        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        model = zeropg.fully_shard(model, mesh=mesh["dp"])

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
            with running statistics and spectral norms need buffer_dtype too.
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
    with failing_together(group):
        check_module(module, stage, param_dtype, reduce_dtype, buffer_dtype)
        limits = limits_of(reshard_after_forward, prefetch_numel, keep_numel, persistent_numel, max_whole_numel)
        requested_trace()
        offload = offload_of(offload_optimizer, "offload_optimizer")
        plan = None if compression is None else plan_of(compression, group)
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
        kept_views = KeptViews(module)
        absorb_inner_calls(module)
        place = device_of(module, device, group)
        check_mesh(mesh, place)
        check_offload_params(offload_params, place)
        plans = plan_units(module, inner_units(module) if units is None else units, ignored)
        check_parameters(module, plans, param_dtype)
        values = Materializer(module, place)
        check_shared_memory(module, plans)
        if plan is not None:
            check_compression(plan, plans, reduce_dtype, place, group)
            check_encoded_weights(
                plan, stage, offload is not None and leaves_memory(offload, place), groups.replicas is not None
            )
    check_same_on_all_ranks(module, plans, options, group)
    parallel = tensor_parallel(((names[0], p) for unit in plans for names, p in unit.parameters), groups, place)
    groups.splits = parallel.splits
    groups.parts = parallel.everybody if parallel.dimensions else None
    if compression == "auto":
        check_chooses_for_all(parallel)
    tier = open_offload(offload, place, parallel.everybody)
    if tier is not None and parallel.everybody.rank() == 0:
        print(offload_plan(tier, plans, stage, param_dtype, groups.shards.size()), file=sys.stderr)
    renormalized = renormalized_parameters(module)
    reductions = reduction_groups(groups, stage, place)
    codecs = make_codecs(plan, compression == "auto", group, reductions)
    weights = None if plan is None else plan.weights
    encoded = set() if plan is None else encoded_parameters(plan, plans)

    def take(index: int) -> list[tuple[Any, Any]]:
        with random_numbers_of_parts(parallel, place, is_needed=not values.is_done):
            values.complete(index)
        return [taken(parameter, parallel, param_dtype) for _, parameter in plans[index].parameters]

    core = _C.ShardedModule(
        [
            (
                unit.name,
                [
                    (
                        names,
                        list(local_of(p).shape),
                        p.dtype,
                        p.requires_grad,
                        id(p) in renormalized,
                        id(p) in encoded,
                        parallel.split_of(p),
                    )
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
    with random_numbers_of_parts(parallel, place, is_needed=not values.is_done):
        together(parallel.everybody, "fully_shard", values.finish)
    kept_views.follow(parameter for unit in plans for _, parameter in unit.parameters)
    prepare_buffers(module, buffer_dtype, group, parallel.everybody)
    if param_dtype is not None:
        refuse_mixed_statistics(module, {id(p) for unit in plans for _, p in unit.parameters}, param_dtype)
    if codecs is not None:
        codecs.coding.exposed_seconds = core.communication_seconds
    vars(module).update(
        _zeropg_asked=asked,
        _zeropg=core,
        _zeropg_state=ShardedState(module, core, plans, param_dtype, parallel, codecs=codecs),
    )
    for unit in plans:
        vars(unit.module)["_zeropg_is_unit"] = True
        swap_class(unit.module)
    if parallel.everybody.rank() == 0:
        unused = what_has_no_effect(
            core, keep_numel=keep_numel, persistent_numel=persistent_numel, max_whole_numel=max_whole_numel
        )
        print(summary(core, plans, reduce_dtype, plan, codecs) + unused, file=sys.stderr)
        if plan is not None:
            say_what_is_not_encoded(
                plan,
                ((plain_name(plan, names, p) or names[0], p) for unit in plans for names, p in unit.parameters),
                how="auto" if compression == "auto" else str(plan),
            )
        if units is None and core.fetch_name.startswith("gathered"):  # also with one rank: what is whole is a copy
            say_what_the_root_holds(plans)
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


def _defaults(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Of the options that ranks compare. Ranks are no default where a caller has said which."""
    defaults = {name: each.default for name, each in inspect.signature(fully_shard).parameters.items()}
    if mesh is None and group is None:
        defaults["mesh"] = described(groups_of(None, None), None)
    else:
        del defaults["mesh"]
    return defaults

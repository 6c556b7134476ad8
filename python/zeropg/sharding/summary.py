"""What rank 0 says of a sharded model."""

from __future__ import annotations

import sys
from typing import Any

import torch

from zeropg._native import _C
from zeropg.compression.plan import Plan
from zeropg.sharding.model_codecs import ModelCodecs
from zeropg.sharding.offload import human_bytes
from zeropg.sharding.units import UnitPlan
from zeropg.tensor_parallel.distributed import local_of

_LARGE_ROOT_BYTES = 16 << 20


def summary(
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
        f"[zeropg] stage {core.stage} over {_ranks(core)}: {count:,} parameters in {_counted(len(plans), 'unit')}, "
        f"computed in {_names(computed)}, masters in {_names(masters)}, gradients averaged in "
        f"{_names({reduce_dtype} if reduce_dtype else masters)}{'' if codec is None else f' as {codec}'}; "
        f"parameters {core.fetch_name}{_encoded_weights(core, compression)}"
    )


def _ranks(core: _C.ShardedModule) -> str:
    if core.replicas == 1:
        return _counted(core.world_size, "rank")
    return f"{core.world_size} ranks ({core.replicas} replicas of {_counted(core.shards, 'shard')})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


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


def say_what_the_root_holds(plans: list[UnitPlan]) -> None:
    *others, root = (sum(local_of(p).nbytes for _, p in plan.parameters) for plan in plans)
    if root > _LARGE_ROOT_BYTES and root > sum(others):
        print(
            f"[zeropg] stage 3: the root holds {human_bytes(root)} of {human_bytes(root + sum(others))}, which every "
            "rank has whole from a forward to the end of its backward, since they are in no block of an nn.ModuleList, "
            "nn.Sequential or nn.ModuleDict. Name modules that run one after the other in units=[...]: then one of "
            "them is whole at a time.",
            file=sys.stderr,
        )


def offload_plan(
    tier: _C.Offload, plans: list[UnitPlan], stage: int, param_dtype: torch.dtype | None, world_size: int
) -> str:
    """One line, before anything is allocated."""
    apart = 0
    for plan in plans:
        for _, parameter in plan.parameters:
            master = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            if parameter.is_floating_point() and (param_dtype or parameter.dtype) != master:
                apart += local_of(parameter).numel() * master.itemsize
    share = apart // (world_size if stage >= 1 else 1)
    masters = f"about {human_bytes(share)} of masters per rank" if share else "no masters: parameters are their own"
    buffers = human_bytes(tier.buffer_bytes)
    return f"[zeropg] offload_optimizer: {masters}, to {tier.describe()}; steps pass through {buffers} of buffers"


def _names(dtypes: set[torch.dtype]) -> str:
    return "/".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"

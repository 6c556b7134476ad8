"""`prepare`: accelerate's call of that name, with models that are sharded."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator
from torch import nn

from zeropg.accelerate.sharded_accelerator import adopt, sharding_models
from zeropg.sharding.fully_shard import fully_shard


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None, **options: Any) -> Any:
    """Prepares objects as `accelerator.prepare` does, with models sharded by `zeropg.fully_shard`. All ranks must call.

        dist.init_process_group("zeropg")  # else the accelerator makes a group of gloo or NCCL
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = zeropg.accelerate.prepare(accelerator, model, optimizer, loader, stage=3)

    Models are sharded in place and not wrapped. Optimizers over their parameters become those of
    `zeropg.shard_optimizer`, inside accelerate's wrapper; loaders and schedulers are what accelerate makes of them. The
    accelerator becomes a `ShardedAccelerator`, whose calls work on sharded models.

    Args:
        accelerator: of plain data parallelism: without DeepSpeed, FSDP or another plugin that shards.
        objects: models, optimizers, loaders, schedulers, in any order; an optimizer comes with its model, or after it.
        device_placement: as accelerate's.
        options: of `zeropg.fully_shard`: stage=3, param_dtype=... The accelerator's mixed_precision "bf16" or "fp16" is
            the default of param_dtype; masters are fp32 then, and what the model returns is cast to fp32. Floating
            inputs are cast to param_dtype, but for keyword arguments with "label" in their names.

    Returns:
        The prepared objects in their order; a single one by itself.

    Raises:
        TypeError: the accelerator is none, or an option is not one of `fully_shard`.
        ValueError: accelerate counts other processes than the process group has, or a batch norm would compute in
            another dtype than that of its running statistics.
        NotImplementedError: the accelerator has a plugin that shards by itself, or fp8.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"[zeropg] accelerate.prepare: the first argument is a {type(accelerator).__name__}, expected an "
            "accelerate.Accelerator"
        )
    adopt(accelerator)
    if not any(isinstance(one, nn.Module) for one in objects) and options:
        raise TypeError(
            f"[zeropg] accelerate.prepare: got {', '.join(options)} but no model to shard; pass the model in the same "
            "call"
        )
    with sharding_models(accelerator, functools.partial(fully_shard, **options)):
        return accelerator.prepare(*objects, device_placement=device_placement)

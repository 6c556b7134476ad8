"""`deepspeed.checkpointing`: functions that a backward runs again, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeropg.deepspeed.config.blocks.activation import ActivationCheckpointing
from zeropg.deepspeed.config.source import load
from zeropg.sharding.activation_places import Here, HostMemory, Partition, Place
from zeropg.sharding.activations import run_checkpointed

_place: Place | None = None  # of the process, as with DeepSpeed


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Chooses where `checkpoint` keeps inputs, for the whole process; arguments win over the configuration.

    Args:
        mpu_: has get_model_parallel_group() or get_tensor_model_parallel_group(): ranks that compute the same
            activations. Without it partition_activations takes the world, and where ranks have different ones each
            keeps its own.
        deepspeed_config: a path, a dictionary, or an object with that as its attribute; its block
            activation_checkpointing.
        partition_activations: each rank of the group keeps a part.
        checkpoint_in_cpu: inputs wait in host memory; with partition_activations their parts do.
        contiguous_checkpointing, num_checkpoints, synchronize, profile: have no effect here.
    """
    global _place
    block = ActivationCheckpointing()
    if deepspeed_config is not None:
        config = load(getattr(deepspeed_config, "deepspeed_config", deepspeed_config))
        block = ActivationCheckpointing.model_validate(config.get("activation_checkpointing", {}))
    whole: Place = HostMemory() if _first(checkpoint_in_cpu, block.cpu_checkpointing) else Here()
    is_in_parts = _first(partition_activations, block.partition_activations)
    _place = Partition(_group_of(mpu_), whole) if is_in_parts else whole


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _place is not None


def reset() -> None:
    """Does nothing: programs call it between forwards without backward, for DeepSpeed's buffers, and there are none.

    What `configure` has chosen stays, as with DeepSpeed.
    """


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args), which a backward runs again; see `zeropg.checkpoint_activations`. Not collective.

    But with partition_activations: the ranks of the group then call it alike. Without gradients `function` just runs.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return run_checkpointed(_place or Here(), function, *args)


non_reentrant_checkpoint = checkpoint


def _first(given: bool | None, configured: bool) -> bool:
    return configured if given is None else given


def _group_of(mpu: Any) -> Any:
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if (get := getattr(mpu, name, None)) is not None:
            return get()
    return None


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"[zeropg] deepspeed.checkpointing.{name} is not available; it has configure, checkpoint, is_configured and "
        "reset. Random numbers of torch's own generators are drawn again in a backward"
    )

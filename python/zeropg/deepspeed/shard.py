"""`shard_as_configured`: a model sharded as DeepSpeed's configuration says."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zeropg.deepspeed.config import Config, sharding_arguments
from zeropg.deepspeed.observation.trial import end_after_sizes
from zeropg.deepspeed.zero.leaf_modules import mark_cut, mark_named, units_around_leaves
from zeropg.quantization.quantize_frozen import quantize_frozen
from zeropg.rank_io.agreement import together
from zeropg.sharding.fully_shard import fully_shard
from zeropg.sharding.rank_groups import shares_gathered
from zeropg.sharding.running_statistics import cast_statistics


def shard_as_configured(model: nn.Module, settings: Config, group: dist.ProcessGroup) -> torch.device:
    """Moves a model to this rank's device and shards it in place. All ranks of `group` must call.

    Leaf modules that the configuration names are marked first. Returns the device. Raises as `fully_shard` does.
    """
    device = device_of_rank(group)
    move_to(model, device)
    if settings.zero_optimization.zero_quantized_nontrainable_weights:
        together(group, "initialize", lambda: _pack_frozen(model))
    leaves = settings.zero_optimization.leaf_module
    is_chosen = "classes" in leaves.model_fields_set
    mark_named(model, leaves.classes if is_chosen else (), leaves.names, leaves.name_suffixes)
    if not is_chosen:
        mark_cut(model, leaves.classes)
    units = units_around_leaves(model)
    end_after_sizes(model, units, group, device.type)
    over = _sharded_over(group, settings.zero_optimization.mics_shard_size, device)
    arguments = sharding_arguments(settings)
    if "buffer_dtype" not in arguments:
        cast_statistics(model, arguments.get("param_dtype"))
    if "keep_numel" in arguments and not (shares_gathered(group, device) and _gathers_plainly(settings)):
        numel = sum(parameter.numel() for parameter in model.parameters())
        arguments["keep_numel"] = numel // settings.zero_optimization.zero_hpz_partition_size
    fully_shard(model, units=units, **over, **arguments)
    return device


def _pack_frozen(model: nn.Module) -> None:
    try:
        quantize_frozen(model, format="int8")
    except ValueError as error:
        raise ValueError(
            f"[zeropg] initialize: zero_optimization.zero_quantized_nontrainable_weights is true, and {error}"
        ) from None


def _gathers_plainly(settings: Config) -> bool:
    """Whether what is gathered is what units compute with: ranks round what travels encoded, each for itself."""
    return not (settings.zero_optimization.zero_quantized_weights and (settings.fp16.enabled or settings.bf16.enabled))


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def device_of_rank(group: dist.ProcessGroup) -> torch.device:
    """Where models of this rank compute: its own GPU where there are GPUs and `group` serves them, else the CPU."""
    if torch.cuda.is_available() and any(device.type == "cuda" for device in group._device_types):
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


def move_to(model: nn.Module, device: torch.device) -> None:
    """Moves a model, but for what is on `meta`, in place; its device is the process's from now on."""
    if device.type != "cpu":
        torch.cuda.set_device(device)
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _sharded_over(group: dist.ProcessGroup, shards: int, device: torch.device) -> dict[str, Any]:
    """The arguments of fully_shard that say over which ranks. `shards`: of each copy of the model; below 1: all."""
    if shards < 1 or shards == group.size():
        return {"process_group": group}
    if group.size() % shards != 0:
        raise ValueError(
            f"[zeropg] initialize: zero_optimization.mics_shard_size is {shards}, and there are {group.size()} ranks; "
            "expected a divisor of these, such as the ranks of a node"
        )
    if group.size() != dist.get_world_size():
        raise NotImplementedError(
            f"[zeropg] initialize: zero_optimization.mics_shard_size is {shards} with a data-parallel group of "
            f"{group.size()} of {dist.get_world_size()} ranks; expected all of them: leave mpu out, or use "
            "zeropg.fully_shard(mesh=) without an engine"
        )
    mesh = init_device_mesh(device.type, (group.size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh}

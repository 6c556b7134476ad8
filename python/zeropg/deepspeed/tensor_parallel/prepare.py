"""`share_layers`: what a configuration's `tensor_parallel` does to a model before it is sharded; `tp_model_init`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropg.deepspeed.config.blocks.parallel import TensorParallel
from zeropg.deepspeed.config.error import ConfigError
from zeropg.deepspeed.config.read import examine
from zeropg.deepspeed.config.source import load
from zeropg.deepspeed.shard import device_of_rank, move_to
from zeropg.deepspeed.tensor_parallel.following import Replaced, refuse_state
from zeropg.deepspeed.tensor_parallel.ranks import TENSORS, mesh_over
from zeropg.rank_io.agreement import check_same, together
from zeropg.tensor_parallel.distributed import groups_around, is_distributed


def share_layers(
    model: nn.Module, config: TensorParallel, operation: str, optimizer: Any = None
) -> tuple[DeviceMesh, Replaced]:
    """Cuts a model's layers over neighbouring ranks, in place, unless they are cut already. All ranks must call.

    Returns the mesh (ranks with data of their own, ranks that share layers), and the parameters that have taken the
    place of others. Raises ValueError, on every rank and before anything is cut, for what cannot be cut, or is planned
    otherwise on another rank, and for an `optimizer` that has made steps.
    """
    # DTensor, which these import, is slow to import, and few need it.
    from zeropg.deepspeed.tensor_parallel.plan import plan_of
    from zeropg.deepspeed.tensor_parallel.split import refuse_hooks, split

    world = dist.distributed_c10d._get_default_group()
    device = device_of_rank(world)
    plan: dict[str, str] = {}

    def announce() -> dict[str, str]:
        if not is_cut(model):
            plan.update(plan_of(model, config))
            refuse_hooks(dict(model.named_parameters()), plan)
            refuse_state(optimizer, plan, model)
        digest = hashlib.sha256(repr(sorted(plan.items())).encode()).hexdigest()
        return {"the plan of layers to cut (digest)": digest[:12]}

    check_same(world, operation, together(world, operation, announce))
    meshes: list[DeviceMesh] = []
    together(world, operation, lambda: meshes.append(mesh_over(device.type, config.size)))
    (mesh,) = meshes
    if is_cut(model):
        together(world, operation, lambda: _check_cut_over(model, mesh))
        return mesh, {}
    move_to(model, device)
    if world.rank() == 0:
        print(_summary(model, plan, config.size), file=sys.stderr)
    return mesh, split(model, plan, mesh[TENSORS])


def is_cut(model: nn.Module) -> bool:
    """Whether some parameter is a DTensor."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype,
    config: str | Path | dict[str, Any] | None = None,
    **others: Any,
) -> nn.Module:
    """Cuts a model's linear layers over `tp_size` neighbouring ranks, in place, and casts it. All ranks must call.

    `initialize` then takes it with a configuration whose tensor_parallel.autotp_size is `tp_size`, and does the same
    for models that are not cut yet; this call is for optimizers that are made before it.

    Args:
        model: its own plan, or `config`, says which layers are cut.
        tp_size: a divisor of the world size.
        dtype: of its parameters afterwards.
        config: DeepSpeed's configuration, of which tensor_parallel is used.

    Returns the same model. Raises ValueError where it cannot be cut, and TypeError for other arguments.
    """
    if others:
        raise TypeError(
            f"[zeropg] tp_model_init: got {', '.join(others)}; expected model, tp_size, dtype and config alone: groups "
            "are made of neighbouring ranks"
        )
    block = (load(config).get("tensor_parallel") if config is not None else None) or {}
    found = examine({"tensor_parallel": {**block, "autotp_size": tp_size}})
    if found.refused:
        raise ConfigError(found.refused)
    settings = found.config.tensor_parallel
    model.to(dtype)
    if settings.size > 1:
        share_layers(model, settings, "tp_model_init")
    return model


def _check_cut_over(model: nn.Module, mesh: DeviceMesh) -> None:
    row = dist.get_process_group_ranks(mesh.get_group(TENSORS))
    for name, parameter in model.named_parameters():
        for group in groups_around(parameter, only_split=True):
            ranks = dist.get_process_group_ranks(group)
            if ranks != row:
                raise ValueError(
                    f"{name!r} is cut over the ranks {ranks} already, and tensor_parallel.autotp_size {len(row)} says "
                    f"{row}; expected the same: groups of neighbouring ranks"
                )


def _summary(model: nn.Module, plan: dict[str, str], size: int) -> str:
    from zeropg.deepspeed.tensor_parallel.plan import STYLES

    cut = [name for name, style in plan.items() if STYLES[style].dim is not None]
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    whole = [name for name in layers if name not in cut]
    text = f"[zeropg] {len(cut)} layers are cut over {size} ranks each"
    return text + (f"; whole on each: {', '.join(whole[:4])}{', ...' if len(whole) > 4 else ''}" if whole else "")

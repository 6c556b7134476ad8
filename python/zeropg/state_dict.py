"""Whole state dicts of a sharded model, out and in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg._native import _C
from zeropg._state import ShardedState, state_of
from zeropg.access import full_parameters


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, rank0_only: bool = True
) -> dict[str, torch.Tensor]:
    """Returns the model's state dict with whole tensors on the CPU. All ranks must call.

    Parameters come from the masters, in their dtype, or cast to `dtype` (floating tensors, buffers too). Tied
    parameters share one tensor. One unit is gathered at a time.

    rank0_only: the other ranks of the group return {}.
    """
    state = state_of(model, "full_state_dict")
    keeps = state.core.rank == 0 or not rank0_only
    values: dict[str, torch.Tensor] = {}
    for group in state.core.flat_groups:
        whole = group.gather_master()
        for names, parameter, offset, numel in group.slots if keeps else ():
            value = whole[offset : offset + numel].view(parameter.shape)
            value = value.to(device="cpu", dtype=_target(value, dtype), copy=True)
            values.update(dict.fromkeys(names, value))
    if not keeps:
        return {}
    result: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if key in values:
            result[key] = values[key]
        elif isinstance(value, torch.Tensor):  # buffers and ignored parameters
            result[key] = value.detach().to(device="cpu", dtype=_target(value, dtype), copy=True)
        else:  # what a module's get_extra_state returned
            result[key] = value
    return result


def _target(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def load_full_state_dict(
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Any:
    """Sets parameters and buffers from whole tensors. All ranks must call. Returns (missing_keys, unexpected_keys).

    broadcast_from_rank0: only rank 0's dict is read; the others may pass {}.

    Raises RuntimeError as nn.Module.load_state_dict does for missing, unexpected (strict) or misshapen entries.
    """
    state = state_of(model, "load_full_state_dict")
    if broadcast_from_rank0:
        state_dict = _broadcast(state_dict, state)
    return model.load_state_dict(state_dict, strict=strict)


def _broadcast(state_dict: dict[str, torch.Tensor], state: ShardedState) -> dict[str, torch.Tensor]:
    group = state.core.process_group
    rank = state.core.rank
    layout = [[(key, value.shape, value.dtype) for key, value in state_dict.items()] if rank == 0 else None]
    dist.broadcast_object_list(layout, group_src=0, group=group)
    received: dict[str, torch.Tensor] = {}
    device = next(state.model.parameters()).device
    for key, shape, dtype in layout[0] or []:
        value = (
            state_dict[key].detach().to(device).contiguous()
            if rank == 0
            else torch.empty(shape, dtype=dtype, device=device)
        )
        dist.broadcast(value, group_src=0, group=group)
        received[key] = value
    return received


def load_into(model: nn.Module, state_dict: dict[str, Any], strict: bool, load_plain: Callable[..., Any]) -> Any:
    """load_state_dict of a sharded model: torch's own for buffers, checks and reports, then the masters themselves."""
    core: _C.ShardedModule = state_of(model, "load_state_dict").core
    with full_parameters(model, writable=True):
        result = load_plain(state_dict, strict=strict)
    core.begin_step()
    for group in core.flat_groups:
        for slot, (names, parameter, _, _) in enumerate(group.slots):
            value = next((state_dict[name] for name in names if name in state_dict), None)
            if value is not None and value.shape == parameter.shape:
                group.load(slot, value)
    core.end_step()
    return result

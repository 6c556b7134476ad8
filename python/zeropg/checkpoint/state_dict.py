"""Whole state dicts of a sharded model, out and in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.checkpoint.broadcast_load import load_from_rank0
from zeropg.checkpoint.plan import digest, local_signatures, optimizer_kind, own_pieces, plan_model, plan_optimizer
from zeropg.checkpoint.structure import decode, fetch_scalar
from zeropg.optim.shard_optimizer import ShardedOptimizer
from zeropg.rank_io.agreement import check_same, collective_device, peers_needed, together
from zeropg.sharding.state import state_of
from zeropg.tensor_parallel.distributed import is_distributed, local_of
from zeropg.tensor_parallel.groups import TensorParallel
from zeropg.tensor_parallel.pieces import Cut, cut_of


def full_state_dict(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    rank0_only: bool = True,
    only: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the model's state dict with whole tensors on the CPU. All ranks must call.

    Parameters come from the masters; those that are DTensors come whole, as plain tensors. Tied parameters share one
    tensor. One flat parameter is gathered at a time.

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        dtype: floating parameters that are sharded are cast to it; default: the masters' dtypes. Buffers and ignored
            parameters keep their own, in which the model computes with them.
        rank0_only: True: all ranks but rank 0 of the group (beside tensor parallelism: of all ranks) return {}. False:
            every rank returns everything.
        only: names of parameters, the same on every rank; other parameters are neither gathered nor returned (LoRA's
            frozen base, say). Flat parameters that hold one of them are gathered whole. Default: all.

    Raises ValueError for a model that is not sharded; on every rank, for names that differ between ranks, or that the
    model has not.
    """
    operation = "full_state_dict"
    state = state_of(model, operation)
    group = state.parallel.everybody
    check_same(group, operation, together(group, operation, lambda: {"only": _checked_names(model, only)}))
    state.settle_writes(operation)
    keeps = group.rank() == 0 or not rank0_only
    gathered: dict[Any, torch.Tensor | None] = {}  # by where the parameter lies; None: is left out
    wanted = None if only is None else set(only)
    for flat in state.core.flat_groups:
        are_wanted = [wanted is None or not wanted.isdisjoint(names) for names, *_ in flat.slots]
        whole = flat.gather_master() if any(are_wanted) else None
        for (_, parameter, offset, numel), is_wanted in zip(flat.slots, are_wanted, strict=True):
            value = whole[offset : offset + numel] if whole is not None and is_wanted else None
            if value is not None and is_distributed(parameter):
                value = _of_all_parts(state.parallel, parameter, value, operation)
            if value is None or not keeps:
                gathered[_place(parameter)] = None
                continue
            value = value.view(parameter.shape)
            target = dtype if dtype is not None and value.is_floating_point() else value.dtype
            gathered[_place(parameter)] = value.to(device="cpu", dtype=target, copy=True)
    result: dict[str, torch.Tensor] = {}

    def collect() -> None:
        for key, value in model.state_dict(keep_vars=True).items() if keeps else ():
            place = _place(value)
            if place in gathered:
                if (master := gathered[place]) is not None:
                    result[key] = master
            elif isinstance(value, torch.Tensor):  # buffers, ignored parameters, and what hooks have made of others
                result[key] = value.detach().to(device="cpu", copy=True)
            else:  # what a module's get_extra_state returned
                result[key] = value

    together(group, operation, collect)  # hooks of the program may fail on rank 0 alone
    return result


def _of_all_parts(parallel: TensorParallel, parameter: torch.Tensor, own: torch.Tensor, operation: str) -> torch.Tensor:
    """The whole of a distributed parameter, flat, of this rank's part and those of others. Collective over these."""
    groups = parallel.splits[parallel.split_of(parameter)]
    if not groups:
        return own
    whole = own.new_zeros(parameter.numel())
    cut_of(parameter).put(whole, 0, own)
    for group in groups:
        whole = _sum_of_bytes(group, operation, whole).to(own.device)
    return whole


def _sum_of_bytes(group: dist.ProcessGroup, operation: str, values: torch.Tensor) -> torch.Tensor:
    """Where every element is one rank's and zero bytes elsewhere: as bytes, so that it keeps every bit. Collective.

    On the device on which the group moves small tensors.
    """
    summed = values.view(torch.uint8).to(collective_device(group))
    with peers_needed(group, operation):
        dist.all_reduce(summed, group=group)
    return summed.view(values.dtype)


def _place(value: Any) -> Any:
    """What is the same for a parameter and for other tensors over its memory, as `p.detach()` is one."""
    value = local_of(value) if isinstance(value, torch.Tensor) else value
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or type(value).__torch_dispatch__ is not (torch.Tensor.__torch_dispatch__)
    ):
        return id(value)
    return value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype


def _checked_names(model: nn.Module, only: Collection[str] | None) -> str:
    """Returns what differs where `only` does."""
    if only is None:
        return "None"
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if isinstance(only, str) or not set(only) <= known:
        wrong = [only] if isinstance(only, str) else sorted(set(only) - known)
        raise ValueError(
            f"only is or has {', '.join(map(repr, wrong[:3]))}; expected a collection of names of parameters, as in "
            "model.named_parameters()"
        )
    return digest(sorted(only))


def full_optimizer_state_dict(optimizer: torch.optim.Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
    """Returns the whole state of a sharded optimizer under the user's parameter names. All ranks must call.

    The layout is that of FSDP's full optimizer state dict: `{"state": {name: {key: value}}, "param_groups": [{"params":
    [names], "lr": ...}]}`. State per element is a CPU tensor of the parameter's shape; Adafactor's row_var
    and col_var have shapes of their own. Parameters that never had a
    gradient have no entry. One tensor is gathered at a time.

    Args:
        optimizer: what `shard_optimizer` returned.
        rank0_only: True: all ranks but rank 0 of the group return {}. False: every rank returns everything.

    Raises TypeError for another optimizer.
    """
    operation = "full_optimizer_state_dict"
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"[zeropg] {operation}: got a {type(optimizer).__name__}, expected what zeropg.shard_optimizer returned"
        )
    state = state_of(optimizer._model, operation)
    state.core.join_step()
    group = state.parallel.everybody
    model = plan_model(state)
    announced = together(group, operation, lambda: local_signatures(optimizer, model))
    plan = plan_optimizer(optimizer_kind(optimizer), [], model, announced)
    own: dict[tuple[str, str], list[tuple[Cut, int, torch.Tensor]]] = {}

    def read_own() -> None:
        if state.core.replica > 0:
            return  # the first replica has the same
        for name, key, cut, values, start in own_pieces(optimizer, model):
            own.setdefault((name, key), []).append((cut, start, values.detach().to("cpu", copy=True)))

    together(group, operation, read_own)  # a disk may fail on one rank

    keeps = group.rank() == 0 or not rank0_only
    result: dict[str, dict[str, Any]] = {}
    for (name, key), index in plan.entries.items():
        shape = plan.shapes[index]
        whole = torch.zeros(shape.numel(), dtype=plan.dtypes[index])
        for cut, start, values in own.pop((name, key), ()):
            cut.put(whole, start, values)
        whole = _sum_of_bytes(group, operation, whole)
        if keeps:
            result.setdefault(name, {})[key] = whole.cpu().view(shape)
    if not keeps:
        return {}
    for name, numbers in plan.numbers.items():
        result.setdefault(name, {}).update({key: decode(value, fetch_scalar) for key, value in numbers.items()})
    name_of = {id(tensor.value): tensor.name for tensor in model.tensors}
    groups = [{**g, "params": [name_of[id(parameter)] for parameter in g["params"]]} for g in optimizer.param_groups]
    return {"state": result, "param_groups": groups}


def load_full_state_dict(
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Any:
    """Sets parameters and buffers from whole tensors. All ranks must call. Returns (missing_keys, unexpected_keys).

    Args:
        model: a module that `fully_shard` has sharded, in any stage.
        state_dict: whole tensors under the model's names, the same on every rank. Of those for DTensors each rank takes
            its part.
        strict: whether missing and unexpected entries are an error.
        broadcast_from_rank0: only rank 0's dict is read, and must hold tensors only; the other ranks may pass {}. They
            hold a piece of some MiB at a time, unless a module loads in a way of its own (hooks, extra state).

    Raises:
        ValueError: `model` is not sharded; on every rank, where `strict` or `broadcast_from_rank0` differ.
        TypeError: with broadcast_from_rank0, an entry is no tensor.
        RuntimeError: an entry has another shape, or (strict) is missing or unexpected, as in nn.Module.load_state_dict.
    """
    operation = "load_full_state_dict"
    state = state_of(model, operation)
    group = state.parallel.everybody
    options = {"strict": str(bool(strict)), "broadcast_from_rank0": str(bool(broadcast_from_rank0))}
    check_same(group, operation, together(group, operation, lambda: options))
    if broadcast_from_rank0:
        return load_from_rank0(state, state_dict, strict=strict)
    return model.load_state_dict(state_dict, strict=strict)

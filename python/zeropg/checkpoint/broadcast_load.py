"""Whole tensors that rank 0 alone has, into a sharded model, a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys

from zeropg.checkpoint.load_masters import Advance, load_masters
from zeropg.checkpoint.plan import refuse_unknown_parts
from zeropg.checkpoint.structure import dtype_name, dtype_of
from zeropg.checkpoint.values import put_whole
from zeropg.export.plan import named_tensors
from zeropg.rank_io.agreement import broadcast_text, peers_needed, together
from zeropg.sharding.sharded_class import FullyShardedModule
from zeropg.sharding.state import ShardedState
from zeropg.tensor_parallel.pieces import cut_of

_OPERATION = "load_full_state_dict"
_PIECE_BYTES = 8 << 20


class _Entry(NamedTuple):
    key: str
    shape: list[int]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def load_from_rank0(state: ShardedState, state_dict: Mapping[str, torch.Tensor], *, strict: bool) -> _IncompatibleKeys:
    """Sets masters and buffers to what rank 0's dictionary has; `load_full_state_dict` says what is raised. Collective.

    A rank holds a piece of some MiB beside its shards. Modules that load in a way of their own (hooks, an overridden
    `_load_from_state_dict`, extra state) get the whole dictionary, which every rank then holds.
    """
    entries = _announce(state, state_dict)
    if not all(_loads_as_torch(module) for module in state.model.modules()):
        whole = {entry.key: _receive(state, state_dict, entry, 0, entry.numel).view(entry.shape) for entry in entries}
        result: _IncompatibleKeys = state.model.load_state_dict(whole, strict=strict)
        return result
    state.check_may_write(_OPERATION)
    state.check_has_own_weights(_OPERATION)
    here = dict(named_tensors(state.model))
    refuse_unknown_parts(state)
    names = _compare(state.model, here, entries, strict)
    own_bytes = sum(entry.numel * entry.dtype.itemsize for entry in entries) // state.core.shards

    def read(advance: Advance) -> None:
        _set_values(state, state_dict, here, entries, advance)

    def finish(_: Advance, failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    load_masters(state, _OPERATION, own_bytes, read, finish)
    return names


def _announce(state: ShardedState, state_dict: Mapping[str, Any]) -> list[_Entry]:
    """What rank 0 has. Raises TypeError, on every rank, where something of it is no tensor."""
    group = state.parallel.everybody
    is_first = group.rank() == 0
    described: list[str | None] = []

    def describe() -> str | None:
        return json.dumps([_described(key, value) for key, value in state_dict.items()]) if is_first else None

    together(group, _OPERATION, lambda: described.append(describe()))
    text = broadcast_text(group, _OPERATION, described[0])
    return [_Entry(key, shape, dtype_of(dtype)) for key, shape, dtype in json.loads(text)]


def _described(key: str, value: Any) -> tuple[str, list[int], str]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"'{key}' is a {type(value).__name__}; with broadcast_from_rank0 every entry must be a tensor: give each "
            "rank the whole dict instead"
        )
    if value.is_meta or value.layout != torch.strided:
        what = "on the meta device" if value.is_meta else f"{value.layout}"
        raise TypeError(f"'{key}' is {what}; with broadcast_from_rank0 every entry must be a dense tensor with values")
    return key, list(value.shape), dtype_name(value.dtype)


def _loads_as_torch(module: nn.Module) -> bool:
    """Whether nn.Module.load_state_dict copies tensor after tensor into this module, and does nothing else."""
    own = [cls for cls in type(module).__mro__ if cls not in (nn.Module, _NormBase, FullyShardedModule)]
    return not (
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or any(name in vars(cls) for cls in own for name in ("load_state_dict", "_load_from_state_dict"))
        or type(module).set_extra_state is not nn.Module.set_extra_state
    )


def _compare(
    model: nn.Module, here: Mapping[str, torch.Tensor], entries: Sequence[_Entry], strict: bool
) -> _IncompatibleKeys:
    """The names on one side alone. Raises RuntimeError as torch does."""
    given = {entry.key for entry in entries}
    # A count that came with torch 0.4.1, and that torch leaves as it is where an older dictionary lacks it.
    counts = {
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
    }
    missing = [name for name in here if name not in given and name not in counts]
    unexpected = [entry.key for entry in entries if entry.key not in here]
    problems = [
        f"size mismatch for {entry.key}: copying a param with shape {torch.Size(entry.shape)} from checkpoint, the "
        f"shape in current model is {here[entry.key].shape}."
        for entry in entries
        if entry.key in here and here[entry.key].shape != torch.Size(entry.shape)
    ]
    if strict:
        problems += [
            f"{what} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names) + "."
            for what, names in (("Missing", missing), ("Unexpected", unexpected))
            if names
        ]
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(problems))
    return _IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def _set_values(
    state: ShardedState,
    state_dict: Mapping[str, torch.Tensor],
    here: Mapping[str, torch.Tensor],
    entries: Sequence[_Entry],
    advance: Advance,
) -> None:
    place_of = {
        id(p): (group, slot) for group in state.core.flat_groups for slot, (_, p, _, _) in enumerate(group.slots)
    }
    # Of a tensor with several names the last one stays, as where torch copies name after name.
    given = {entry.key for entry in entries}
    last_name = {id(value): name for name, value in here.items() if name in given}
    for entry in entries:
        value = here.get(entry.key)
        if value is None or last_name[id(value)] != entry.key:
            continue
        step, cut = max(1, _PIECE_BYTES // entry.dtype.itemsize), cut_of(value)
        for start in range(0, entry.numel, step):
            piece = _receive(state, state_dict, entry, start, min(start + step, entry.numel))
            if id(value) in place_of:
                group, slot = place_of[id(value)]
                for first, values in cut.pick(start, piece):
                    group.load(slot, values, first)
            else:
                put_whole(value.detach(), start, piece)
            advance(piece.nbytes // state.core.shards)


def _receive(
    state: ShardedState, state_dict: Mapping[str, torch.Tensor], entry: _Entry, start: int, stop: int
) -> torch.Tensor:
    """Elements [start, stop) of rank 0's tensor, flat, on every rank. Collective."""
    group = state.parallel.everybody
    device = next(state.model.parameters()).device
    if group.rank() == 0:
        piece = state_dict[entry.key].detach().reshape(-1)[start:stop].to(device).contiguous()
    else:
        piece = torch.empty(stop - start, dtype=entry.dtype, device=device)
    with peers_needed(group, _OPERATION):
        dist.broadcast(piece.view(torch.uint8), group_src=0, group=group)
    return piece

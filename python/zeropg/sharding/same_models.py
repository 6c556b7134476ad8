"""Ranks compare what they shard, so that one rank's mistake is an error on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropg.sharding.units import UnitPlan
from zeropg.tensor_parallel.distributed import is_distributed, placements_text


@contextmanager
def failing_together(group: dist.ProcessGroup) -> Iterator[None]:
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


def check_same_on_all_ranks(
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
    kind += f", {placements_text(tensor)}" if is_distributed(tensor) else ""
    return f"{name!r} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {kind}"

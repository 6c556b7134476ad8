"""A sharded module's core for one process: what `shard_optimizer` sees of it, without communication.

`shard(model, rank, world_size)` lays the trainable parameters out in one flat buffer and gives this rank its slice; the
test then plays all ranks one after another, each with its own copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch

ALIGNMENT = 32


class FakeFlat:
    def __init__(
        self, model: torch.nn.Module, rank: int, world_size: int, master_dtype: torch.dtype | None, stage: int
    ):
        slots = []
        end = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                slots.append((name, parameter, end))
                end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        unit = ALIGNMENT * world_size
        self.numel = -(-end // unit) * unit
        first, last = rank * self.numel // world_size, (rank + 1) * self.numel // world_size
        self.master_start, self.master_stop = (0, self.numel) if stage == 0 else (first, last)
        self.total_numel = self.numel
        self.is_trainable = True
        self.unit_name = ""
        self.slots = [((name,), parameter, offset, parameter.numel()) for name, parameter, offset in slots]
        dtype = slots[0][1].dtype
        values = torch.zeros(self.numel, dtype=master_dtype or dtype)
        for _, parameter, offset in slots:
            values[offset : offset + parameter.numel()] = parameter.detach().flatten().to(values.dtype)
        self.master = values[self.master_start : self.master_stop].clone()
        self.master_dtype, self.master_numel = self.master.dtype, self.master.numel()
        self.parameter_out = None if master_dtype in (None, dtype) else self.master.to(dtype)
        self.segments = [
            (parameter, name, start - self.master_start, stop - self.master_start)
            for name, parameter, _, start, stop in self._cut(self.master_start, self.master_stop)
        ]
        self.local_shards = [
            (name, start - self.master_start, start - offset, stop - offset)
            for name, _, offset, start, stop in self._cut(first, last)
        ]

    def _cut(self, first: int, last: int) -> Iterator[tuple[str, torch.nn.Parameter, int, int, int]]:
        for (name,), parameter, offset, numel in self.slots:
            start, stop = max(offset, first), min(offset + numel, last)
            if start < stop:
                yield name, parameter, offset, start, stop

    def has_grad(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None

    def grad(self) -> torch.Tensor | None:
        whole = torch.zeros(self.numel, dtype=self.master.dtype)
        for _, parameter, offset, numel in self.slots:
            if parameter.grad is not None:
                whole[offset : offset + numel] = parameter.grad.flatten()
        return whole[self.master_start : self.master_stop]


class FakeCore:
    def __init__(
        self, model: torch.nn.Module, rank: int, world_size: int, master_dtype: torch.dtype | None, stage: int
    ):
        self.rank, self.world_size, self.shards = rank, world_size, world_size
        self.optimizer_offload = None
        self.flat_groups = [FakeFlat(model, rank, world_size, master_dtype, stage)]
        self.calls: list[str] = []
        self.publish: Callable[[], None] = self.publish_own

    def begin_step(self, options: tuple[int, int] = (0, 0)) -> None:
        self.calls.append("begin_step")

    def end_step(self, overlaps: bool = False) -> None:
        self.calls.append("end_step")
        self.publish()

    def join_step(self) -> None:
        """Nothing is on its way."""

    def zero_gradients(self) -> None:
        self.calls.append("zero_gradients")

    def publish_own(self) -> None:
        """Puts this rank's updated range into the model's parameters, as an all-gather would for all ranges."""
        for flat in self.flat_groups:
            source = flat.master if flat.parameter_out is None else flat.parameter_out
            for _, parameter, offset, start, stop in flat._cut(flat.master_start, flat.master_stop):
                values = source[start - flat.master_start : stop - flat.master_start]
                parameter.data.view(-1)[start - offset : stop - offset] = values


def shard(
    model: torch.nn.Module,
    rank: int = 0,
    world_size: int = 1,
    master_dtype: torch.dtype | None = None,
    stage: int = 3,
) -> torch.nn.Module:
    model._zeropg = FakeCore(model, rank, world_size, master_dtype, stage)  # type: ignore[assignment]
    return model


def ranks_of(model: torch.nn.Module, world_size: int, stage: int = 3) -> list[torch.nn.Module]:
    """Copies of the model, one per rank."""
    return [shard(copy.deepcopy(model), rank, world_size, stage=stage) for rank in range(world_size)]


def whole_master(models: list[torch.nn.Module]) -> torch.Tensor:
    return torch.cat([flat.master for model in models for flat in model._zeropg.flat_groups])  # type: ignore

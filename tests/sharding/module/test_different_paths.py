"""Ranks that take different paths through a model whose units are gathered: an error on all of them, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.compression.test_all_reduce import group_on_hosts
from tests.sharding.ranks import on_ranks, raises

Path = Callable[["Blocks", torch.Tensor, int], torch.Tensor]


class Blocks(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.path(self, self.embed(x), dist.get_rank())).sum()


def detaches(model: Blocks, x: torch.Tensor, rank: int) -> torch.Tensor:
    """One rank does before a middle block."""
    for index, block in enumerate(model.blocks):
        x = block(x.detach() if rank == 0 and index == 2 else x)
    return x


def skips_all(model: Blocks, x: torch.Tensor, rank: int) -> torch.Tensor:
    for block in model.blocks if rank == 0 else ():
        x = block(x)
    return x


def skips_the_last(model: Blocks, x: torch.Tensor, rank: int) -> torch.Tensor:
    for block in list(model.blocks)[: 3 + (rank > 0)]:
        x = block(x)
    return x


def same(model: Blocks, x: torch.Tensor, rank: int) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def make(path: Path, group: dist.ProcessGroup | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks(path)
    group = group or group_on_hosts("a,b,b"[: 2 * dist.get_world_size() - 1])
    zeropg.fully_shard(model, stage=3, units=[*model.blocks], process_group=group)
    return model


@pytest.mark.parametrize("path", [detaches, skips_all, skips_the_last])
@on_ranks(2)
def test_two_ranks_are_told_within_seconds(path: Path) -> None:
    model = make(path)
    start = time.monotonic()
    with raises(RuntimeError, "ranks"):
        model(torch.ones(2, 16)).backward()
        dist.barrier(group=zeropg.sharding.state.state_of(model, "test").core.process_group)
    assert time.monotonic() - start < 10


@on_ranks(3)
def test_a_late_rank_is_waited_for() -> None:
    model = make(same)
    for step in range(3):
        if dist.get_rank() == step:
            time.sleep(3)
        model(torch.ones(2, 16)).backward()


@on_ranks(2)
def test_two_models_of_one_shape_are_told_apart() -> None:
    """Each rank would compute with half of either."""
    group = group_on_hosts("a,b")
    first, second = make(same, group), make(same, group)
    x = torch.ones(2, 16)
    with torch.no_grad():
        first(x), second(x)
        with raises(RuntimeError, "item"):
            for model in (first, second) if dist.get_rank() else (second, first):
                model(x)

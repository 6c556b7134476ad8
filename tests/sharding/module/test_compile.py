"""torch.compile of the blocks of a sharded model: one piece of code for all blocks of a class. Compiled autograd."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import zeropg
from tests.sharding.ranks import BACKENDS, STAGES, close, on_ranks, raises

BLOCKS = 12  # more than torch._dynamo.config.recompile_limit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(model: Any) -> list[torch.Tensor]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(model, zeropg.FullyShardedModule):
        optimizer = zeropg.shard_optimizer(optimizer, model)
    losses = []
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS, timeout=120)
def test_blocks_share_what_is_compiled(stage: int, compiler: str) -> None:
    wanted = train(Stack())
    for is_compiled_first in (True, False):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(compiler)
        model = Stack()
        if not is_compiled_first:
            zeropg.fully_shard(model, stage=stage)
        for block in model.blocks:
            block.compile(backend=counter)
        if is_compiled_first:
            zeropg.fully_shard(model, stage=stage)
        losses = train(model)
        assert all(close(a, b) for a, b in zip(losses, wanted, strict=True))
        assert 1 <= counter.frame_count <= 2, counter.frame_count
    torch._dynamo.reset()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_modules_of_a_class_get_one_class_which_goes_with_them(stage: int) -> None:
    def shard_and_forget() -> list[weakref.ref[Any]]:
        class Own(nn.Linear):
            """Of a user."""

        models = [zeropg.fully_shard(nn.Sequential(Own(3, 3), Own(3, 3)), stage=stage, units=[Own]) for _ in range(2)]
        kinds = {type(layer) for model in models for layer in model}
        assert len(kinds) == 1 and len({type(model) for model in models}) == 1
        (kind,) = kinds
        assert issubclass(kind, Own) and issubclass(kind, zeropg.FullyShardedModule) and kind is not Own
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(kind, name) == getattr(Own, name)
        again = zeropg.fully_shard(Own(3, 3), stage=stage)
        assert type(again) is kind and type(Own(3, 3)) is Own
        return [weakref.ref(kind), weakref.ref(Own)]

    gone = shard_and_forget()
    dist.barrier()
    gc.collect()
    gc.collect()  # ours lets go of the user's, which is a cycle by itself
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=BACKENDS)
def test_compiled_autograd_is_refused_and_a_plain_backward_follows(stage: int) -> None:
    from torch._dynamo import compiled_autograd

    plain, model = Stack(), zeropg.fully_shard(Stack(), stage=stage)
    x = torch.ones(4, 6, dtype=torch.float64)
    loss = model(x)
    for part in (loss, model.blocks[0](x).sum()):
        with (
            raises(NotImplementedError, "[zeropg] backward: compiled autograd cannot trace"),
            compiled_autograd._enable(torch.compile(backend="eager")),
        ):
            part.backward()
    loss.backward()
    plain(x).backward()
    with zeropg.full_gradients(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and close(ours.grad, theirs.grad)

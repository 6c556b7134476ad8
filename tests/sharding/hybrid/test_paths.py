"""What differs between ranks on the way: paths through the model, precision on the wire, a rank that dies."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.hybrid.training import (
    TWO_HOSTS,
    assert_replicas_are_equal,
    make_mesh,
    over_gloo_in_soak,
    own_part,
    shard,
    step,
)
from tests.sharding.ranks import close, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import Place, run_ranks


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == skipped else torch.tanh(block(x))
        return x


def skip_blocks() -> None:
    rank, mesh = dist.get_rank(), make_mesh()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    plain = Skipping().double()
    model = shard(Skipping().double(), mesh)
    # Each replica takes a path of its own: its units are gathered by its own ranks.
    sum(plain(part, 1 + index // 2).square().mean() / 4 for index, part in enumerate(x.chunk(4))).backward()
    model(own_part(x), 1 + rank // 2).square().mean().backward()
    with zeropg.full_gradients(model):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert close(mine.grad, theirs.grad)
    model.zero_grad()
    # The ranks of one replica may not, but where they share memory.
    path = 1 + rank % 2 if rank >= 2 else 1
    if not model._zeropg.fetch_is_collective:
        assert model._zeropg.fetch_name == "shared"
        model(own_part(x), path).square().mean().backward()
    elif rank >= 2:
        with raises(RuntimeError, "the same units in the same order", f"shard {1 - rank % 2} gathers unit"):
            model(own_part(x), path)


@over_gloo_in_soak
def test_replicas_may_take_different_paths(rank_pool, backend: str, place: Place) -> None:
    rank_pool(4, backend, place).run(skip_blocks)


def meet_inside_backward() -> None:
    """The program's own collectives run between those of buckets; no rank may wait for a replica's bucket before."""
    rank, mesh = dist.get_rank(), make_mesh()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    for stage in (0, 1, 2, 3):
        model = shard(Skipping().double(), mesh, stage=stage)
        for delay in range(4):

            def meet(gradient: torch.Tensor, delay: int = delay) -> None:
                time.sleep(0.01 * (rank == delay))
                dist.all_reduce(gradient.clone())

            for block in model.blocks:
                block.register_forward_hook(lambda *call, meet=meet: call[-1].register_hook(meet) and None)
            model(own_part(x), -1).square().mean().backward()
            for block in model.blocks:
                block._forward_hooks.clear()
            model.zero_grad()


@over_gloo_in_soak
def test_programs_may_meet_inside_backward(rank_pool, backend: str, place: Place) -> None:
    rank_pool(4, backend, place).run(meet_inside_backward)


def train_in_16_bits() -> None:
    mesh, batches = make_mesh(), make_batches()[:5]
    for stage in (0, 1, 2, 3):
        losses = []
        for over in (None, mesh):
            model = zeropg.fully_shard(
                make_model(), mesh=over, stage=stage, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            )
            optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
            losses.append([step(model, optimizer, batch, accumulate=3) for batch in batches])
        assert_replicas_are_equal(model)
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
        assert losses[1][-1] < losses[1][0]


@over_gloo_in_soak
def test_replicas_stay_equal_in_16_bits(rank_pool, backend: str, place: Place) -> None:
    rank_pool(4, backend, place).run(train_in_16_bits)


def use_checkpoints_and_frozen_layers() -> None:
    """Activation checkpointing, evaluation between, layers that are frozen and unfrozen, several backwards."""
    mesh, batch = make_mesh(), make_batches()[0][:8]
    for stage in (0, 1, 2, 3):
        runs = []
        for sharded in (False, True):
            model: Any = make_model(torch.float64)
            model.blocks[0].requires_grad_(False)
            for block in model.blocks:
                block.forward = _checkpointed(block.forward)
            optimizer: Any = make_optimizer(model)
            if sharded:
                model = shard(model, mesh, stage=stage)
                optimizer = zeropg.shard_optimizer(optimizer, model)
            for index in range(4):
                model.blocks[0].requires_grad_(index >= 2)
                for part in batch.chunk(2):
                    (loss_of(model, own_part(part) if sharded else part) / 2).backward()
                with torch.no_grad():
                    loss_of(model, batch)
                optimizer.step()
                optimizer.zero_grad()
            if sharded:
                assert_replicas_are_equal(model)
            runs.append(zeropg.full_state_dict(model, rank0_only=False) if sharded else model.state_dict())
        assert all(close(runs[1][name], value) for name, value in runs[0].items()), stage


def _checkpointed(forward: Any) -> Any:
    return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)


@over_gloo_in_soak
def test_checkpointed_and_frozen_layers_train_as_in_one_process(rank_pool, backend: str, place: Place) -> None:
    rank_pool(4, backend, place).run(use_checkpoints_and_frozen_layers)


def lose_a_rank(stage: int) -> float:
    """How long each of the others waits for its error, in seconds."""
    model = shard(make_model(), stage=stage)
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    step(model, optimizer, make_batches()[0])
    loss = loss_of(model, own_part(make_batches()[1]))
    if dist.get_rank() == 3:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    with raises(RuntimeError):
        loss.backward()
        optimizer.step()
    return time.monotonic() - start


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_dies_is_an_error_on_all_others(stage: int) -> None:
    waited = run_ranks(4, lose_a_rank, stage, place=TWO_HOSTS, expect_death=[3])
    assert all(seconds < 10 for seconds in waited[:3]), waited

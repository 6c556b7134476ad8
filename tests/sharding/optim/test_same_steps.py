"""Ranks that are about to step differently, and graphs of weights that are no more: errors, not a torn model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import STAGES, on_ranks, raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer


def _add_group(model: Any, optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": optimizer.param_groups[0]["lr"]})


def _change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1.01


def _drop_gradient(model: Any, optimizer: Any) -> None:
    model.norm.bias.grad = None


NUMBERS, GRADIENTS = "param groups of other numbers", "gradients of other parameters"
CHANGES: dict[Callable[[Any, Any], None], str] = {
    _change_rate: NUMBERS,
    _add_group: NUMBERS,
    _drop_gradient: GRADIENTS,
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, backend=("zeropg", "gloo"))
def test_a_rank_that_steps_differently_is_named_and_nothing_is_stepped(stage: int) -> None:
    batches = make_batches()
    for change, words in CHANGES.items():
        model = zeropg.fully_shard(make_model(), stage=stage)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        loss_of(model, batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = zeropg.full_state_dict(model, rank0_only=False)
        loss_of(model, batches[1]).backward()
        if dist.get_rank() == 1:
            change(model, optimizer)
        with raises(RuntimeError, "step: rank 1 steps with", words, "nothing was stepped"):
            optimizer.step()
        after = zeropg.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(after[key], before[key]) for key in before)
        if dist.get_rank() == 0:
            change(model, optimizer)
        optimizer.step()  # now that both have it


@on_ranks(2)
def test_notes_in_param_groups_and_the_last_digits_of_numbers_may_differ() -> None:
    rank = dist.get_rank()
    model = zeropg.fully_shard(make_model())
    optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
    optimizer.param_groups[0]["loss here"] = float(rank)
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15 * rank
    loss_of(model, make_batches()[0]).backward()
    optimizer.step()


def _load(model: Any, folder: Path) -> None:
    zeropg.load_checkpoint(folder, model)


def _write(model: Any, folder: Path) -> None:
    with zeropg.writable_shards(model) as shards:
        for _, tensor, _, _ in shards:
            tensor.mul_(0.5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", [_load, _write])
@on_ranks(2)
def test_a_backward_refuses_weights_that_changed_since_its_forward(
    stage: int, write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model = zeropg.fully_shard(make_model(), stage=stage)
    zeropg.save_checkpoint(tmp_path, model)
    loss = loss_of(model, make_batches()[0])
    write(model, tmp_path)
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    loss_of(model, make_batches()[0]).backward()


@on_ranks(2)
def test_averages_may_be_looked_at_between_forward_and_backward() -> None:
    model = zeropg.fully_shard(make_model())
    average = zeropg.ema(model, 0.5)
    loss = loss_of(model, make_batches()[0])
    with average.average_parameters():
        pass
    loss.backward()


@on_ranks(2)
def test_loaded_options_are_copies() -> None:
    model = zeropg.fully_shard(nn.Linear(4, 4))
    one, other = (
        zeropg.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), model) for _ in range(2)
    )
    other.load_state_dict(one.state_dict())
    one.param_groups[0]["lr"].fill_(7.0)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1)

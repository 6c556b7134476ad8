"""What single ranks decide between a backward and its step is an error on every rank: in that step, or in the next."""

from __future__ import annotations

from collections.abc import Callable
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
    on_both_backends,
    own_part,
    shard,
    step,
)
from tests.sharding.ranks import raises
from tests.small_gpt import loss_of, make_batches, make_model, make_optimizer
from tests.spawn import Place

_DRIFT = ("the replicas of a slice have different masters since an earlier step", "single ranks changed gradients")


def _change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1.01


def _change_gradient(model: Any, optimizer: Any) -> None:
    model.norm.bias.grad = torch.full_like(model.norm.bias, 3.0)


def _clip(model: Any, optimizer: Any) -> None:
    zeropg.clip_grad_norm_(model, 0.5)  # compared among the shards of one copy alone


def _drop_gradient(model: Any, optimizer: Any) -> None:
    model.norm.bias.grad = None


def _change_state(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].add_(1.0)


SEEN_AT_ONCE: dict[Callable[[Any, Any], None], str] = {
    _change_rate: "rank 2 steps with param groups of other numbers",
    _clip: "So do the arguments of clip_grad_norm_ count",
    _drop_gradient: "rank 2 steps with gradients of other parameters",
}
CHANGES: tuple[Callable[[Any, Any], None], ...] = (_change_gradient, _change_state, *SEEN_AT_ONCE)


def drift(stage: int, dtype: torch.dtype | None) -> None:
    rank, mesh, batches = dist.get_rank(), make_mesh(), make_batches()
    for change in CHANGES:
        model = shard(make_model(), mesh, stage=stage, param_dtype=dtype)
        optimizer = zeropg.shard_optimizer(make_optimizer(model), model)
        step(model, optimizer, batches[0])
        loss_of(model, own_part(batches[1])).backward()
        if rank >= 2:  # one replica, of which each shard has elements of every parameter that is large enough
            change(model, optimizer)
        if change in SEEN_AT_ONCE:
            with raises(RuntimeError, SEEN_AT_ONCE[change], "nothing was stepped"):
                optimizer.step()
            assert_replicas_are_equal(model)
            continue
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, own_part(batches[2])).backward()
        with raises(RuntimeError, *_DRIFT):
            optimizer.step()
        assert_replicas_are_equal(model)


@on_both_backends
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_that_drift_are_an_error_on_every_rank(rank_pool, backend: str, place: Place, stage: int) -> None:
    rank_pool(4, backend, place).run(drift, stage, None)


def test_computed_parameters_show_drift_of_masters(rank_pool) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(drift, 3, torch.bfloat16)


def one_rank_drifts() -> None:
    """A rank alone: those that hold other slices raise, too, and nobody waits."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shard(nn.Linear(64, 64), make_mesh(), stage=2)
    optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 64)).sum().backward()
    if rank == 1:
        model.weight.grad = torch.full_like(model.weight, 3.0)
    optimizer.step()
    with raises(RuntimeError, *_DRIFT):
        zeropg.full_state_dict(model)
    assert_replicas_are_equal(model)


def test_the_drift_of_one_rank_is_an_error_on_all(rank_pool) -> None:
    rank_pool(4, "zeropg", TWO_HOSTS).run(one_rank_drifts)

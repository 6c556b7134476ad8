"""What a signal handler raises while a rank waits for the others reaches the program, and the model works on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropg
from tests.sharding.ranks import close, raises
from tests.spawn import run_ranks

DOUBLE = torch.float64


class Rung(Exception):
    pass


def ring_in(seconds: float) -> None:
    def handle(number: int, frame: Any) -> None:
        raise Rung

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def interrupt_rank_0(function: Callable[[], Any]) -> None:
    """Rank 0 waits in `function` until a handler raises; only then do the others call it."""
    store = dist.PrefixStore("interrupts", dist.distributed_c10d._get_default_store())
    if dist.get_rank() != 0:
        store.wait(["interrupted"])
        function()
        return
    with raises(Rung):
        ring_in(0.5)
        function()
    store.set("interrupted", "")


def make_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 5, dtype=DOUBLE)


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def interrupt_full_gradients(stage: int) -> None:
    x = torch.ones(2, 5, dtype=DOUBLE)
    wanted = gradients_of(make_linear(), x)
    model = zeropg.fully_shard(make_linear(), stage=stage)
    model(x).square().sum().backward()

    def show() -> None:
        with zeropg.full_gradients(model):
            pass

    interrupt_rank_0(show)
    with raises(RuntimeError, "is sharded"):
        model.weight.grad.clone()
    model.zero_grad()
    for times in (1, 2):
        model(x).square().sum().backward()
        with zeropg.full_gradients(model):
            found = [parameter.grad.clone() for parameter in model.parameters()]
        assert all(close(a, times * b) for a, b in zip(found, wanted, strict=True)), times


@pytest.mark.parametrize("stage", [2, 3])
def test_full_gradients_that_were_not_shown_are_hidden(stage: int) -> None:
    run_ranks(2, interrupt_full_gradients, stage)

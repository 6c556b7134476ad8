"""`compression="auto"`: what it chooses, and that it notices a change."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zeropg
from tests.compression.test_all_reduce import group_on_hosts
from tests.sharding.ranks import on_ranks, raises
from zeropg.compression import BlockQuant, State, auto, ddp_hook
from zeropg.compression.state import backend_of


def pretend(monkeypatch: Any, seconds: dict[str, float]) -> None:
    monkeypatch.setattr(auto, "_measure", lambda backend, codec, numel: seconds[auto._name(codec)])


class Apart:
    """As much of a group on two hosts as choosing needs."""

    def rank(self) -> int:
        return 0

    def topology(self) -> Any:
        return SimpleNamespace(nodes=[[0], [1]])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 0.95, 0.93, 0.92), None),  # nothing is clearly faster
        ((1.0, 0.5, 0.48, 0.47), "bf16()"),  # the processors are the limit
        ((1.0, 0.5, 0.3, 0.29), "block_quant(bits=8, block=256)"),
        ((1.0, 0.5, 0.27, 0.14), "block_quant(bits=4, block=256)"),
        ((1.0, 2.0, 3.0, 4.0), None),
    ],
)
def test_takes_what_loses_least_of_what_is_clearly_fastest(
    seconds: tuple[float, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, dict(zip([auto._name(codec) for codec in auto.CANDIDATES], seconds, strict=True)))
    choice = auto.choose(Apart())
    assert auto._name(choice.codec) == (expected or "fp32")
    assert ("nothing is clearly faster" in str(choice)) == (expected is None)


@on_ranks(2)
def test_compresses_nothing_in_shared_memory_and_says_so_once() -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ddp = DDP(nn.Linear(64, 64))
        state = State("auto", model=ddp.module)
        ddp.register_comm_hook(state, ddp_hook)
        ddp(torch.ones(4, 64) * (dist.get_rank() + 1)).sum().backward()
    assert state.codec is None
    expected = torch.full((64, 64), 6.0)
    torch.testing.assert_close(ddp.module.weight.grad, expected)
    lines = said.getvalue().splitlines()
    assert [("compression auto: gradients travel as fp32" in line) for line in lines] == [True] * (dist.get_rank() == 0)


@on_ranks(2)
def test_chooses_again_when_the_link_changes_and_loses_nothing() -> None:
    choices = iter([BlockQuant(4), None])
    original = auto.choose

    def choose(backend: Any) -> auto.Choice:
        codec = next(choices)
        return auto.Choice(codec, 1024, tuple(auto.Measured(each, 1.0) for each in auto.CANDIDATES))

    import zeropg.compression.state as module

    module.choose = choose
    try:
        model = nn.Linear(64, 64, bias=False)
        state = State("auto", model=model)
        assert state.codec == BlockQuant(4)
        rank = dist.get_rank()
        given, got = torch.zeros(64, 64), torch.zeros(64, 64)
        for step in range(300):
            inputs = [
                torch.randn(64, 64, generator=torch.Generator().manual_seed(2 * step + each)) for each in range(2)
            ]
            buffer = inputs[rank].clone().view(-1)
            state.begin_bucket()
            from zeropg.compression.ddp import _reduce

            _reduce(state, buffer, [model.weight]).wait()
            state.end_bucket(1e-3 if step < 150 else 5e-3, buffer.numel())  # what it took, as it were
            given += sum(inputs) / 2
            got += buffer.view(64, 64)
        assert state.codec is None
        torch.testing.assert_close(got, given, atol=1e-3, rtol=0)  # what 4 bits still owed came as it is
        assert state.residuals is not None and not state.residuals.segments()
    finally:
        module.choose = original


@on_ranks(2)
def test_fully_shard_takes_what_auto_chooses() -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model = zeropg.fully_shard(nn.Linear(64, 64), compression="auto")
        model(torch.ones(4, 64)).sum().backward()
        apart = zeropg.fully_shard(nn.Linear(64, 64), stage=1, compression="auto", process_group=group_on_hosts("a,b"))
        apart(torch.ones(4, 64)).sum().backward()
    if dist.get_rank() == 0:
        chosen = [line for line in said.getvalue().splitlines() if "compression auto" in line]
        assert len(chosen) == 2 and "all ranks share a node" in chosen[0] and "ms" in chosen[1]
    with raises(TypeError, "compression is 'int4'", '"auto"'):
        zeropg.fully_shard(nn.Linear(8, 8), compression="int4")


@on_ranks(2)
def test_all_ranks_measure_the_same() -> None:
    choice = auto.choose(backend_of(group_on_hosts("a,b"), "test"))
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, choice)
    assert everybodys[0] == everybodys[1]
    assert len(choice.measured) == len(auto.CANDIDATES)

"""`compression="auto"`: what it chooses, and that it notices a change."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
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
from zeropg.compression import BlockQuant, State, auto, ddp_hook, report
from zeropg.compression.ddp import _reduce
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


@contextlib.contextmanager
def choosing(*codecs: Any) -> Iterator[list[float]]:
    """`choose` gives these in turn. Yields [seconds, bytes] of all reductions, which the test adds up as it likes."""
    choices, reduced = iter(codecs), [0.0, 0.0]

    def choose(backend: Any) -> auto.Choice:
        measured = tuple(auto.Measured(each, (1.0,)) for each in auto.CANDIDATES)
        return auto.Choice(((0, next(choices)),), (1024,), measured)

    original = auto.choose, auto.Auto._reduced
    auto.choose, auto.Auto._reduced = choose, lambda self: tuple(reduced)
    try:
        yield reduced
    finally:
        auto.choose, auto.Auto._reduced = original


def of_rank(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2 * step + rank))


@on_ranks(2)
def test_chooses_again_when_the_link_changes_and_loses_nothing() -> None:
    with choosing(BlockQuant(4), None) as reduced:
        model = nn.Linear(64, 64, bias=False)
        state = State("auto", process_group=group_on_hosts("a,b"), model=model)
        assert state.codec == BlockQuant(4)
        given, got = torch.zeros(64, 64), torch.zeros(64, 64)
        for step in range(300):
            buffer = of_rank(step, dist.get_rank(), 64 * 64)
            state.begin_bucket()
            _reduce(state, buffer, [model.weight]).wait()
            reduced[0] += 1e-3 if step < 150 else 5e-3
            reduced[1] += buffer.nbytes
            given += (of_rank(step, 0, 64, 64) + of_rank(step, 1, 64, 64)) / 2
            got += buffer.view(64, 64)
        assert state.codec is None
        torch.testing.assert_close(got, given, atol=1e-3, rtol=0)  # what 4 bits still owed came as it is
        assert state.residuals is not None and not state.residuals.segments()
        assert report(state).encoded_bytes > 0 and "as they are" in str(report(state))


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


def test_small_reductions_get_what_loses_less() -> None:
    """A codec's own time counts for little where there is much to send, and for much where there is little."""
    seconds = ((1.0, 65.0), (1.02, 33.0), (1.3, 17.3), (2.0, 10.0))
    measured = tuple(auto.Measured(codec, each) for codec, each in zip(auto.CANDIDATES, seconds, strict=True))
    choice = auto.Choice(auto._rows(measured, (1 << 14, 1 << 20)), (1 << 14, 1 << 20), measured)
    assert choice.codec == BlockQuant(4)
    assert choice.codec_of(1000) is None
    chosen = [auto.CANDIDATES.index(choice.codec_of(1 << exponent)) for exponent in range(10, 28)]
    assert chosen == sorted(chosen) and set(chosen) == {0, 1, 2, 3}
    assert "below" in str(choice)


def sharded_run(stage: int) -> tuple[torch.Tensor, torch.Tensor, str, str]:
    """What the averages of 120 steps add up to, and what they should; what was said; the report."""
    said = io.StringIO()
    with choosing(BlockQuant(4), None) as reduced, contextlib.redirect_stderr(said):
        model = nn.Linear(64, 64, bias=False)
        zeropg.fully_shard(model, stage=stage, compression="auto", process_group=group_on_hosts("a,b"))
        optimizer = zeropg.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        before = zeropg.full_state_dict(model, rank0_only=False)["weight"].clone()
        given = torch.zeros(64, 64)
        for step in range(120):
            optimizer.zero_grad()
            (model(of_rank(step, dist.get_rank(), 1, 64)) @ of_rank(step + 500, dist.get_rank(), 64)).sum().backward()
            optimizer.step()
            reduced[0] += 1e-3 if step < 60 else 5e-3
            reduced[1] += 1000.0
            given += sum(torch.outer(of_rank(step + 500, r, 64), of_rank(step, r, 1, 64)[0]) for r in (0, 1)) / 2
        return (
            before - zeropg.full_state_dict(model, rank0_only=False)["weight"],
            given,
            said.getvalue(),
            str(report(model)),
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharded_model_chooses_again_and_loses_nothing(rank_pool: Any, stage: int) -> None:
    for rank, (got, given, said, text) in enumerate(rank_pool(2).run(sharded_run, stage)):
        assert ("the link has changed" in said) == (rank == 0)
        torch.testing.assert_close(got, given, atol=1e-3, rtol=0)
        assert "they are (auto)" in text and "MB saved" in text


@on_ranks(2)
def test_auto_on_one_rank_alone_is_an_error_on_all() -> None:
    model = nn.Linear(64, 64)
    group = group_on_hosts("a,b")
    with raises(ValueError, "the plan is 'auto' on rank 0", "BlockQuant", "on rank 1"):
        if dist.get_rank() == 0:
            State("auto", process_group=group, model=model)
        else:
            State(BlockQuant(4), process_group=group, model=model).begin_bucket()
    with raises(Exception, "compression"):
        zeropg.fully_shard(model, compression="auto" if dist.get_rank() == 0 else BlockQuant(4), process_group=group)

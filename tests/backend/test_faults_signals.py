"""Signals while a rank waits for others: Python's handlers run at once, not at the deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.signals import Rung, ring_in
from tests.spawn import run_ranks

SEED = random.randrange(1 << 32)
AT_ONCE_SECONDS = 15  # about 50 ms on a machine that is not busy; each deadline is 30 s away or more


WAITS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "work": lambda group: dist.all_reduce(torch.ones(3_000_000), group=group, async_op=True),
    "barrier": lambda group: dist.barrier(group),
    "receive": lambda group: dist.recv(torch.ones(3), group=group, group_src=1),
    "send": lambda group: dist.send(torch.ones(3_000_000), group=group, group_dst=1),
}


def wait_for_a_signal(name: str, seed: int) -> float:
    """How long after the signal rank 0's handler ran, while rank 1 keeps it waiting."""
    rank = dist.get_rank()
    group = dist.new_group()
    dist.barrier()
    late = 0.0
    if rank == 0:
        start, delay = time.monotonic(), random.Random(seed).uniform(0.01, 0.4)
        try:
            ring_in(delay)
            work = WAITS[name](group)
            if work is not None:
                work.wait()
        except Rung as rung:
            late = float(str(rung)) - start - delay
        else:
            raise AssertionError("nothing interrupted the wait")
    dist.barrier()
    group.abort()
    return late


@pytest.mark.parametrize("name", WAITS)
def test_a_signal_is_handled_in_the_middle_of_a_wait(name: str) -> None:
    late = run_ranks(2, wait_for_a_signal, name, SEED)[0]
    assert late < AT_ONCE_SECONDS, late


def wait_for_a_signal_while_connecting(seed: int) -> tuple[float, str]:
    from zeropg import _C

    rank = dist.get_rank()
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=30)
    dist.barrier()
    late, error = 0.0, ""
    if rank == 0:
        start, delay = time.monotonic(), random.Random(seed).uniform(0.01, 0.4)
        try:
            ring_in(delay)
            _C.ProcessGroupZero(store, rank, 2, options)
        except Rung as rung:
            late = float(str(rung)) - start - delay
    dist.barrier()
    if rank == 1:
        start = time.monotonic()
        try:
            _C.ProcessGroupZero(store, rank, 2, options)
        except dist.DistBackendError as raised:
            late, error = time.monotonic() - start, str(raised)
    return late, error


def test_a_signal_is_handled_while_a_group_is_made() -> None:
    (late, _), (seconds, error) = run_ranks(2, wait_for_a_signal_while_connecting, SEED, backend="gloo")
    assert 0 < late < AT_ONCE_SECONDS, late
    assert "rank 0: " in error and "interrupted" in error, error
    assert seconds < AT_ONCE_SECONDS, seconds

"""Signals while a rank waits for others: Python's handlers run at once, and where they return the wait goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.signals import Rung, ring_in
from tests.spawn import SeparateHosts, run_ranks

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


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize("name", WAITS)
def test_a_signal_is_handled_in_the_middle_of_a_wait(name: str, hosts: tuple[int, ...]) -> None:
    late = run_ranks(2, wait_for_a_signal, name, SEED, place=SeparateHosts(hosts=hosts))[0]
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


HANDLED_IN_A_WAIT = 5  # many more are delivered: a wait lets Python's handlers run every 50 ms
LARGE = 4_000_000  # more than a connection buffers: who sends waits, too


def sum_of(count: int, is_async: bool) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        total = torch.full((count,), 1.0 + dist.get_rank())
        work = dist.all_reduce(total, async_op=is_async)
        if work is not None:
            work.wait()
        return total

    return call


def receive() -> torch.Tensor:
    message = torch.full((LARGE,), 3.0)
    if dist.get_rank() == 0:
        message.zero_()
        dist.recv(message, 1)
    else:
        dist.send(message, 0)
    return message


def send() -> torch.Tensor:
    message = torch.full((LARGE,), 3.0)
    if dist.get_rank() == 0:
        dist.send(message, 1)
    else:
        message.zero_()
        dist.recv(message, 0)
    return message


def exchange() -> torch.Tensor:
    output = torch.empty(2 * LARGE)
    dist.all_to_all_single(output, torch.full((2 * LARGE,), 3.0))
    return output


def make_a_group() -> torch.Tensor:
    group = dist.new_group()
    total = torch.full((3,), 1.5)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return total


def wait_at_a_barrier() -> torch.Tensor:
    dist.barrier()
    return torch.tensor(3.0)


# All threes, when they are done.
INTERRUPTED: dict[str, Callable[[], torch.Tensor]] = {
    "all_reduce": sum_of(3, is_async=False),
    "large all_reduce": sum_of(LARGE, is_async=False),
    "work": sum_of(LARGE, is_async=True),
    "all_to_all": exchange,
    "barrier": wait_at_a_barrier,
    "receive": receive,
    "send": send,
    "group": make_a_group,
}


def wait_in_a_storm() -> list[str]:
    """Rank 0 waits in each call until it has handled many signals: rank 1 does not come earlier."""
    rank = dist.get_rank()
    # A connection of its own: the handler runs in the middle of what the group's may be doing.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    count = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count == HANDLED_IN_A_WAIT:
            store.set(f"storm in {name}", "")

    wrong = []
    for name, call in INTERRUPTED.items():
        dist.barrier()
        if rank == 0:
            count = 0
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        else:
            store.wait([f"storm in {name}"])
        result = call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not result.eq(3).all() or (rank == 0 and count < HANDLED_IN_A_WAIT):
            wrong.append(f"{name}: {result} after {count} signals")
    return wrong


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_wait_goes_on_when_the_handler_of_a_signal_returns(hosts: tuple[int, ...]) -> None:
    assert run_ranks(2, wait_in_a_storm, place=SeparateHosts(hosts=hosts)) == [[], []]

"""Who is named where ranks of several hosts wait for each other, and one of them falls or does not come.

Every living rank names that one and no rank that merely waits for it. Each test prints its seed: SEED replays one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.bare_groups import error_of_a_group
from tests.backend.deadlines import new_group_with
from tests.spawn import SeparateHosts, run_ranks

SEED = random.randrange(1 << 32)
HOSTS = {"two of two": (0, 0, 1, 1), "three": (0, 1, 1, 2), "one rank each": (0, 1, 2)}
TIMEOUT_SECONDS = 4.0
LIMIT_SECONDS = TIMEOUT_SECONDS + 20  # the machine may be busy
IS_SOAK = "ZEROPG_PROGRAM_SECONDS" in os.environ  # make soak
KILL_ROUNDS = 5 if IS_SOAK else 1
STOP_ROUNDS = 5 if IS_SOAK else 2


def guilty_in(error: str) -> set[int]:
    """The ranks that an error tells the reader to look at."""
    accused = (
        r"(?:see what|the process of|the connection to|look for the error of) ranks? (\d+(?:, \d+)*)"
        r"|ranks? (\d+(?:, \d+)*) did not come to the store"
    )
    return {int(rank) for match in re.findall(accused, error) for ranks in match if ranks for rank in ranks.split(", ")}


def exchange(group: Any) -> None:
    size = group.size()
    dist.all_to_all_single(torch.empty(1000 * size), torch.ones(1000 * size), group=group)


def gather(group: Any) -> None:
    size = group.size()
    dist.all_gather_into_tensor(torch.empty(100_000 * size), torch.ones(100_000), group=group)


def broadcast(group: Any) -> None:
    dist.broadcast(torch.ones(100_000), 1, group=group)
    dist.barrier(group)


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(10), group=group),
    "large all_reduce": lambda group: dist.all_reduce(torch.ones(1_000_000), group=group),
    "all_gather": gather,
    "all_to_all": exchange,
    "broadcast": broadcast,
    "barrier": lambda group: dist.barrier(group),
}


def error_after(call: Callable[[Any], Any], group: Any) -> tuple[str, float]:
    while True:
        start = time.monotonic()
        try:
            call(group)
        except dist.DistBackendError as error:
            return str(error), time.monotonic() - start


def pids_of_all() -> list[int]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def wake(victim: int, pid: int) -> None:
    """By one of the others, which has its error: the rest have theirs at once or at nearly the same deadline."""
    if dist.get_rank() == (victim + 1) % dist.get_world_size():
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)


def check(error: str, rank: int, size: int, victim: int, also: Set[int] = frozenset()) -> None:
    """also: ranks that may be named beside the victim."""
    assert re.match(rf"\[zeropg rank {rank}/{size}\] ([A-Za-z_:]+ #\d+|bootstrap)", error), error
    assert guilty_in(error) - also == {victim}, (victim, error)


def die_in(name: str, victim: int, delay: float) -> tuple[str, float]:
    group = new_group_with(2 * LIMIT_SECONDS)
    CALLS[name](group)
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return error_after(CALLS[name], group)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_is_killed_in_a_collective_is_named_on_every_host(hosts: str) -> None:
    place = SeparateHosts(hosts=HOSTS[hosts])
    size = len(place.hosts)
    for turn in range(KILL_ROUNDS):
        chance = random.Random(SEED + turn)
        name, victim, delay = chance.choice(sorted(CALLS)), chance.randrange(size), chance.uniform(0, 0.3)
        print(f"{name}: rank {victim} dies after {delay:.3f} s, SEED {SEED + turn}")
        answers = run_ranks(size, die_in, name, victim, delay, expect_death=[victim], place=place)
        for rank in set(range(size)) - {victim}:
            error, seconds = answers[rank]
            check(error, rank, size, victim)
            assert seconds < LIMIT_SECONDS, (seconds, error)


def fall_behind(seed: int) -> list[tuple[str, bool, int, str, float]]:
    """One rank after another is stopped in the middle of an operation, or is busy with something else."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    pids = pids_of_all()
    answers = []
    for _ in range(STOP_ROUNDS):
        name, victim, delay = chance.choice(sorted(CALLS)), chance.randrange(size), chance.uniform(0, 0.3)
        is_stopped = chance.random() < 0.6
        group = new_group_with(TIMEOUT_SECONDS)
        if rank == victim and is_stopped:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        if rank == victim and not is_stopped:
            dist.distributed_c10d._get_default_store().wait([f"go on {len(answers)}"])
        error, seconds = error_after(CALLS[name], group)
        if is_stopped:
            wake(victim, pids[victim])
        else:
            dist.distributed_c10d._get_default_store().set(f"go on {len(answers)}", "")
        answers.append((name, is_stopped, victim, error, seconds))
        group.abort()
        dist.barrier()
    return answers


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_is_stopped_or_does_not_come_is_named_on_every_host(hosts: str) -> None:
    print(f"SEED {SEED}")
    place = SeparateHosts(hosts=HOSTS[hosts])
    size = len(place.hosts)
    of_ranks = run_ranks(size, fall_behind, SEED, timeout=150, place=place)
    for rank, answers in enumerate(of_ranks):
        for name, is_stopped, victim, error, seconds in answers:
            if rank != victim:
                print(name, is_stopped, victim, error)
                check(error, rank, size, victim)
                assert seconds < LIMIT_SECONDS, (seconds, error)


def fall_while_connecting(victim: int, delay: float, sign: signal.Signals) -> tuple[str, float, int]:
    """Makes one group after another: the error, how long it took, and of which group it was."""
    from zeropg import _C

    pids = pids_of_all()
    if dist.get_rank() == victim:
        threading.Timer(delay, os.kill, (os.getpid(), sign)).start()
    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    error, turn = "", 0
    while not error:
        start = time.monotonic()
        store = dist.PrefixStore(f"turn{turn}", dist.distributed_c10d._get_default_store())
        error = error_of_a_group(store, options)
        turn += 1
    if sign == signal.SIGSTOP:
        wake(victim, pids[victim])
    return error, time.monotonic() - start, turn


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_falls_while_groups_are_made_is_named_on_every_host(hosts: str, sign: signal.Signals) -> None:
    place = SeparateHosts(hosts=HOSTS[hosts])
    size = len(place.hosts)
    for turn in range(KILL_ROUNDS):
        chance = random.Random(SEED + turn)
        victim, delay = chance.randrange(size), chance.uniform(0, 0.2)
        print(f"rank {victim} gets {sign.name} after {delay:.3f} s, SEED {SEED + turn}")
        dead = [victim] if sign == signal.SIGKILL else []
        answers = run_ranks(
            size, fall_while_connecting, victim, delay, sign, backend="gloo", place=place, expect_death=dead
        )
        others = set(range(size)) - {victim}
        print(*answers, sep="\n")
        for rank in others:
            error, seconds, group = answers[rank]
            # Who lost the victim at the end of one group does not come to the next one, either.
            check(error, rank, size, victim, {peer for peer in others if answers[peer][2] < group})
            assert seconds < LIMIT_SECONDS, (seconds, error)

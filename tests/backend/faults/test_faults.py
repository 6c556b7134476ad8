"""Faults at random moments: a rank that is killed or stopped in the middle of any operation, or that calls another one.

Every living rank raises within the group's timeout an error that names the operation and the guilty rank; after
`abort()` nothing of the group is left, though the object is, and a new group of the living can be made. Each test
prints its seed: SEED replays one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.bare_groups import error_of_a_group
from tests.backend.deadlines import new_group_with
from tests.memory import Resources, expect_no_more_than, held_resources
from tests.spawn import SeparateHosts, run_ranks

SEED = random.randrange(1 << 32)
IS_SOAK = "ZEROPG_PROGRAM_SECONDS" in os.environ  # make soak
ROUNDS = 5 if IS_SOAK else 1
STOPS = 7 if IS_SOAK else 4
RANKS = 3
TIMEOUT_SECONDS = 3.0
LIMIT_SECONDS = TIMEOUT_SECONDS + 20  # for an error to come; the machine may be busy, and the world has 70 s
AT_ONCE_SECONDS = 15.0  # where the group has twice as long

Call = Callable[[Any, int], Any]  # (group, number of float32 per rank)


def all_to_all(group: Any, count: int) -> Any:
    size = group.size()
    return dist.all_to_all_single(torch.empty(count * size), torch.ones(count * size), group=group)


def ring(group: Any, count: int) -> None:
    rank, size = group.rank(), group.size()
    operations = [
        dist.P2POp(dist.isend, torch.ones(count), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, torch.empty(count), group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def pipeline(group: Any, count: int) -> None:
    rank, size = group.rank(), group.size()
    if rank > 0:
        dist.recv(torch.empty(count), group=group, group_src=rank - 1)
    if rank < size - 1:
        dist.send(torch.ones(count), group=group, group_dst=rank + 1)
    dist.barrier(group)


def several_at_once(group: Any, count: int) -> None:
    works = [dist.all_reduce(torch.ones(count), group=group, async_op=True) for _ in range(4)]
    for work in works:
        work.wait()


def gather(group: Any, count: int) -> Any:
    rank, size = group.rank(), group.size()
    parts = [torch.empty(count) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.ones(count), parts, group=group, group_dst=0)
    return dist.barrier(group)


def scatter(group: Any, count: int) -> Any:
    rank, size = group.rank(), group.size()
    parts = [torch.ones(count) for _ in range(size)] if rank == 1 else None
    dist.scatter(torch.empty(count), parts, group=group, group_src=1)
    return dist.barrier(group)


def all_gather(group: Any, count: int) -> Any:
    return dist.all_gather_into_tensor(torch.empty(count * group.size()), torch.ones(count), group=group)


def reduce_scatter(group: Any, count: int) -> Any:
    return dist.reduce_scatter_tensor(torch.empty(count), torch.ones(count * group.size()), group=group)


def coalesced(group: Any, count: int) -> None:
    size = group.size()
    ones, room = [torch.ones(count), torch.ones(3)], [torch.empty(count * size), torch.empty(3 * size)]
    group.allgather_into_tensor_coalesced(room, ones).wait()
    group.reduce_scatter_tensor_coalesced(ones, room).wait()
    group.allreduce_coalesced(ones).wait()


def all_to_all_of_lists(group: Any, count: int) -> Any:
    size = group.size()
    return dist.all_to_all([torch.empty(count) for _ in range(size)], [torch.ones(count)] * size, group=group)


def receive_from_anybody(group: Any, count: int) -> None:
    """From rank 1 or 2, in any order; then all know that it was done."""
    if group.rank() == 0:
        for _ in range(group.size() - 1):
            dist.recv(torch.empty(count), group=group)
    else:
        dist.send(torch.ones(count), group=group, group_dst=0)
    dist.barrier(group)


def monitored_barrier(group: Any, count: int) -> None:
    backend = group._get_backend(torch.device("cpu"))
    backend.monitored_barrier(backend.options._timeout)


CALLS: dict[str, Call] = {
    "all_reduce": lambda group, count: dist.all_reduce(torch.ones(count), group=group),
    "several at once": several_at_once,
    "broadcast": lambda group, count: [dist.broadcast(torch.ones(count), 1, group=group), dist.barrier(group)],
    "reduce": lambda group, count: [dist.reduce(torch.ones(count), 2, group=group), dist.barrier(group)],
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "barrier": lambda group, _: dist.barrier(group),
    "ring": ring,
    "pipeline": pipeline,
    "coalesced": coalesced,
    "all_to_all of lists": all_to_all_of_lists,
    "receive from anybody": receive_from_anybody,
    "monitored_barrier": monitored_barrier,
}
FEW_FAILURES_BYTES = 64 << 20  # the allocator's heaps of threads that have ended: it does not grow with more failures
COUNTS = (1, 10_000, 1_000_000)  # 4 bytes: the caller's thread; 40 kB; several chunks


def error_after(call: Call, group: Any, count: int) -> tuple[str, float]:
    """Repeats the call until it raises: the error, and how long the last call took."""
    while True:
        start = time.monotonic()
        try:
            call(group, count)
        except dist.DistBackendError as error:
            return str(error), time.monotonic() - start


def abort_and_drop(group: Any, before: Resources | None = None) -> None:
    """before: what the process held without the group. It holds no more as soon as that is aborted."""
    group.abort()
    if before is not None:
        expect_no_more_than(before, FEW_FAILURES_BYTES)
    dist.destroy_process_group(group)


def expect_a_new_group_works(members: list[int]) -> None:
    again = dist.new_group(members, use_local_synchronization=True)
    total = torch.ones(10)
    dist.all_reduce(total, group=again)
    assert total[0].item() == len(members)
    dist.destroy_process_group(again)


def check_error(error: str, rank: int, size: int = RANKS) -> None:
    pattern = rf"\[zeropg rank {rank}/{size}\] [A-Za-z_:]+ #\d+"
    assert re.match(pattern, error), error


def die_in(name: str, victim: int, seed: int) -> tuple[str, float]:
    rank = dist.get_rank()
    chance = random.Random(seed)
    count = chance.choice(COUNTS)
    delay = chance.uniform(0, 0.1)
    group = new_group_with(2 * AT_ONCE_SECONDS)
    CALLS[name](group, count)
    dist.barrier()  # everybody has had its part
    abort_and_drop(group)
    del group
    before = held_resources()
    group = new_group_with(2 * AT_ONCE_SECONDS)  # a death is noticed at once, not at the deadline
    CALLS[name](group, count)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    answer = error_after(CALLS[name], group, count)
    abort_and_drop(group, before)
    del group
    expect_a_new_group_works([peer for peer in range(dist.get_world_size()) if peer != victim])
    return answer


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_killed_at_any_moment_is_named_at_once(name: str) -> None:
    for turn in range(ROUNDS):
        seed = SEED + turn
        victim = random.Random(f"{name} {seed}").randrange(RANKS)
        print(f"{name}: rank {victim} dies, SEED {seed}")
        answers = run_ranks(RANKS, die_in, name, victim, seed, expect_death=[victim])
        for rank in set(range(RANKS)) - {victim}:
            error, seconds = answers[rank]
            check_error(error, rank)
            assert f"the process of rank {victim} died" in error, error
            assert seconds < AT_ONCE_SECONDS, (seconds, error)


def test_a_rank_killed_at_any_moment_on_another_host_is_named_at_once() -> None:
    chance = random.Random(SEED)
    for name in chance.sample(sorted(CALLS), 3):
        victim = chance.randrange(RANKS)
        print(f"{name}: rank {victim} dies, SEED {SEED}")
        place = SeparateHosts(hosts=(0, 1, 1))
        answers = run_ranks(RANKS, die_in, name, victim, SEED, expect_death=[victim], place=place)
        for rank in set(range(RANKS)) - {victim}:
            error, seconds = answers[rank]
            check_error(error, rank)
            assert re.search(f"the (process|connection) (of|to) rank {victim} (died|broke)", error), error
            assert seconds < AT_ONCE_SECONDS, (seconds, error)


def stop_in(names: list[str], seed: int) -> list[tuple[str, int, int, str, float]]:
    """One rank after another stops in the middle of an operation and is woken when the others have their error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    before: Resources | None = None
    answers = []
    for name in names:
        count = chance.choice(COUNTS)
        victim = chance.randrange(size)
        delay = chance.uniform(0, 0.1)
        group = new_group_with(TIMEOUT_SECONDS)
        if rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        error, seconds = error_after(CALLS[name], group, count)
        if rank == (victim + 1) % size:
            time.sleep(0.5)  # for the third one's deadline
            os.kill(pids[victim], signal.SIGCONT)
        answers.append((name, count, victim, error, seconds))
        abort_and_drop(group, before)
        del group
        expect_a_new_group_works(list(range(size)))
        before = before or held_resources()
    assert before is not None
    expect_no_more_than(before, FEW_FAILURES_BYTES)
    return answers


# Where the rank that was waited for may itself have waited for the one that stopped.
CHAINS = ("all_to_all", "all_to_all of lists", "ring", "pipeline", "receive from anybody")


def test_a_rank_stopped_at_any_moment_is_named_within_the_timeout() -> None:
    print(f"SEED {SEED}")
    names = random.Random(SEED).sample(sorted(CALLS), STOPS)
    of_ranks = run_ranks(RANKS, stop_in, names, SEED, timeout=100)
    for rank, answers in enumerate(of_ranks):
        for name, count, victim, error, seconds in answers:
            what = (name, count, victim, rank, error)
            check_error(error, rank)
            if rank != victim:
                assert seconds < LIMIT_SECONDS, (seconds, *what)
                assert f"timed out after {1000 * TIMEOUT_SECONDS:.0f} ms" in error, what
                late = re.findall(r"waiting for (?:any of )?ranks? ([0-9, ]+)", error)
                assert late, what
                if name in CHAINS:
                    late += re.findall(r"itself waits for ranks? ([0-9, ]+)", error)
                    assert any(str(victim) in ranks for ranks in late), what
                else:
                    assert all(str(victim) in ranks for ranks in late), what


# What a rank may call by mistake: each differs from each other one in the operation, size, dtype, root or reduction.
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda group: dist.all_reduce(torch.ones(100), group=group),
    "maximum": lambda group: dist.all_reduce(torch.ones(100), dist.ReduceOp.MAX, group=group),
    "more": lambda group: dist.all_reduce(torch.ones(101), group=group),
    "many more": lambda group: dist.all_reduce(torch.ones(2_000_000), group=group),
    "integers": lambda group: dist.all_reduce(torch.ones(100, dtype=torch.int32), group=group),
    "asynchronous halves": lambda group: dist.all_reduce(
        torch.ones(200, dtype=torch.float16), group=group, async_op=True
    ),
    "from 0": lambda group: dist.broadcast(torch.ones(100), 0, group=group),
    "from 1": lambda group: dist.broadcast(torch.ones(100), 1, group=group),
    "to 0": lambda group: dist.reduce(torch.ones(100), 0, group=group),
    "to 2": lambda group: dist.reduce(torch.ones(100), 2, group=group),
    "gathered": lambda group: all_gather(group, 100),
    "scattered": lambda group: reduce_scatter(group, 100),
    "exchanged": lambda group: all_to_all(group, 100),
    "barrier": lambda group: dist.barrier(group),
}


def differ(seed: int, rounds: int) -> list[tuple[str, str, int, str, float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(seed)
    before: Resources | None = None
    answers = []
    for turn in range(rounds):
        usual, other = chance.sample(sorted(MISTAKES), 2)
        mistaken = chance.randrange(size)
        delays = [chance.choice([0, 0, 0.02]) for _ in range(size)]
        pauses = [chance.choice([0, 0, 0.1]) for _ in range(size)]
        group = new_group_with(2 * AT_ONCE_SECONDS)  # a mistake is noticed at once, too
        time.sleep(delays[rank])
        start = time.monotonic()
        error, work = "no error", None
        try:
            work = MISTAKES[other if rank == mistaken else usual](group)
            if work is not None:
                work.wait()
            time.sleep(pauses[rank])
            dist.barrier(group)  # where a rank's part was over before it could hear of the others'
        except dist.DistBackendError as raised:
            error = str(raised)
        answers.append((usual, other, mistaken, error, time.monotonic() - start))
        abort_and_drop(group, before)
        del group, work
        if turn == 4:
            before = held_resources()
    assert before is not None
    expect_no_more_than(before, FEW_FAILURES_BYTES)
    expect_a_new_group_works(list(range(size)))
    return answers


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_different_calls_are_an_error_on_every_rank(hosts: tuple[int, ...]) -> None:
    print(f"SEED {SEED}")
    of_ranks = run_ranks(RANKS, differ, SEED, 25, timeout=100, place=SeparateHosts(hosts=hosts))
    for rank, answers in enumerate(of_ranks):
        for usual, other, mistaken, error, seconds in answers:
            what = (usual, other, mistaken, rank, seconds, error)
            check_error(error, rank)
            assert "the ranks made different calls" in error, what
            assert re.search(rf"\brank {mistaken}: ", error), what
            assert seconds < AT_ONCE_SECONDS, what


def all_receive() -> tuple[str, float]:
    group = new_group_with(2 * AT_ONCE_SECONDS)
    root = (dist.get_rank() + 1) % dist.get_world_size()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.broadcast(torch.ones(100), root, group=group)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 2), (0, 1, 1)])
def test_ranks_that_all_wait_to_receive_learn_that_they_made_different_calls(hosts: tuple[int, ...]) -> None:
    for rank, (error, seconds) in enumerate(run_ranks(len(hosts), all_receive, place=SeparateHosts(hosts=hosts))):
        check_error(error, rank, len(hosts))
        assert "the ranks made different calls" in error, error
        assert seconds < AT_ONCE_SECONDS, (seconds, error)


def fall_while_connecting(victim: int, delay: float, sign: signal.Signals) -> str:
    from zeropg import _C

    rank = dist.get_rank()
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), sign)).start()
    options = _C.BackendOptions()
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    error = ""
    turn = 0
    while not error:
        turn += 1
        store = dist.PrefixStore(f"turn{turn}", dist.distributed_c10d._get_default_store())
        error = error_of_a_group(store, options)
    if rank == (victim + 1) % RANKS and sign == signal.SIGSTOP:
        time.sleep(0.5)
        os.kill(pids[victim], signal.SIGCONT)
    return error


@pytest.mark.parametrize(
    ("hosts", "sign"),
    [((0, 0, 0), signal.SIGSTOP), ((0, 1, 1), signal.SIGSTOP), ((0, 0, 0), signal.SIGKILL)],
)
def test_a_rank_that_falls_while_groups_are_made_is_an_error_on_every_rank(
    hosts: tuple[int, ...], sign: signal.Signals
) -> None:
    for turn in range(ROUNDS):
        chance = random.Random(SEED + turn)
        victim, delay = chance.randrange(RANKS), chance.uniform(0, 0.2)
        print(f"rank {victim} gets {sign.name} after {delay:.3f} s, SEED {SEED + turn}")
        place, dead = SeparateHosts(hosts=hosts), {victim} if sign == signal.SIGKILL else {}
        errors = run_ranks(
            RANKS, fall_while_connecting, victim, delay, sign, backend="gloo", place=place, expect_death=dead
        )
        for rank in set(range(RANKS)) - set(dead):
            error = errors[rank]
            assert error.startswith(f"[zeropg rank {rank}/{RANKS}] "), error
            assert rank == victim or f"{victim}" in error.removeprefix(f"[zeropg rank {rank}/{RANKS}] "), error

"""Who waits for an operation runs it: queued and synchronous ones, and several threads, on one group."""

from __future__ import annotations

import random
import threading
import time

import torch
import torch.distributed as dist

from tests.spawn import run_ranks


def mix_queued_and_synchronous(rounds: int) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    jitter = random.Random(rank)
    wrong = 0
    for i in range(rounds):
        first, second = torch.full((16,), float(i + rank)), torch.full((16,), float(1000 * i + rank))
        work = dist.all_reduce(first, async_op=True)
        end = time.perf_counter() + jitter.random() * 300e-6
        while time.perf_counter() < end:
            pass
        dist.all_reduce(second)
        work.wait()
        ranks = world_size * (world_size - 1) / 2
        wrong += not (first == world_size * i + ranks).all()
        wrong += not (second == world_size * 1000 * i + ranks).all()
    return wrong


def test_a_synchronous_call_right_after_a_queued_one_uses_the_other_bank() -> None:
    assert run_ranks(2, mix_queued_and_synchronous, 1000) == [0, 0]


def wait_in_threads(rounds: int, threads: int) -> int:
    """Every thread waits for works of its own, in an order of its own; messages go their way beside them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for i in range(rounds):
        tensors = [torch.full((16 << (j % 3 * 6),), float(i + j + rank)) for j in range(4 * threads)]
        received = torch.zeros(50_000)
        messages = [
            dist.irecv(received, (rank - 1) % world_size),
            dist.isend(torch.full((50_000,), float(rank)), (rank + 1) % world_size),
        ]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]

        def wait(start: int, works: list[dist.Work] = works, seed: int = rank * rounds + i) -> None:
            mine = works[start::threads]
            random.Random(seed + start).shuffle(mine)
            for work in mine:
                work.wait()

        waiting = [threading.Thread(target=wait, args=(j,)) for j in range(threads)]
        for thread in waiting:
            thread.start()
        for message in messages:
            assert message is not None
            message.wait()
        for thread in waiting:
            thread.join()
        ranks = world_size * (world_size - 1) / 2
        wrong += [(i, j) for j, t in enumerate(tensors) if not (t == world_size * (i + j) + ranks).all()]
        wrong += [(i, -1)] if not (received == (rank - 1) % world_size).all() else []
    return len(wrong)


def test_threads_that_wait_share_the_work() -> None:
    assert run_ranks(2, wait_in_threads, 60, 3) == [0, 0]


def post_and_do_something_else() -> None:
    """What nobody waits for goes on by itself: a receive, then a queue of collectives."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for i in range(5):
        received = torch.zeros(300_000)
        works = [dist.irecv(received, 1 - rank), dist.isend(torch.ones(300_000), 1 - rank)]
        works += [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(3)]
        end = time.monotonic() + 20
        while not all(work.is_completed() for work in works if work is not None):
            assert time.monotonic() < end, [work.is_completed() for work in works if work is not None]
            time.sleep(0.001)
        store.add(f"round{i}", 1)
        assert (received == 1).all()


def test_what_nobody_waits_for_goes_on() -> None:
    run_ranks(2, post_and_do_something_else)
